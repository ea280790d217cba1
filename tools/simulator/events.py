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
