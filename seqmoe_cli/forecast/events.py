"""TraceEvents: a trace in the order in which a model asks for experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from seqmoe_cli.forecast.trace import Trace
from seqmoe_cli.residency.policies import Ints


@dataclass(frozen=True)
class TraceEvents:
    """A trace as events, one for each (token, layer), in the order in which a model asks."""

    trace: Trace

    @cached_property
    def events(self) -> Ints:
        """Flat expert ids [T * L, K]."""
        first = np.arange(self.num_layers)[:, None] * self.trace.num_experts
        return (self.trace.experts.astype(np.int64) + first).reshape(-1, self.trace.top_k)

    @property
    def num_layers(self) -> int:
        return self.trace.num_layers

    @property
    def num_experts(self) -> int:
        """Of all layers."""
        return self.num_layers * self.trace.num_experts

    @cached_property
    def next_use(self) -> Ints:
        """[T * L, K]: the event that uses the same expert next; T * L if none does."""
        flat = self.events.ravel()
        order = np.argsort(
            flat, kind="stable"
        )  # the uses of an expert one after the other, in time
        again = flat[order[1:]] == flat[order[:-1]]
        next_use = np.full(flat.shape, len(self.events))
        next_use[order[:-1][again]] = order[1:][again] // self.events.shape[1]
        return next_use.reshape(self.events.shape)

    @cached_property
    def first_use(self) -> Ints:
        """[all experts]: the first event that uses each; T * L if none does."""
        first = np.full(self.num_experts, len(self.events))
        first[self.events[::-1].ravel()] = np.repeat(
            np.arange(len(self.events))[::-1], self.events.shape[1]
        )
        return first
