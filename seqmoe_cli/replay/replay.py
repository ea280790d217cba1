"""Replay of a trace: one pool for all layers, demand loading, an event for each (token, layer).

T tokens, L layers, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seqmoe_cli.forecast.trace import Trace
from seqmoe_cli.replay.policies import Policy
from seqmoe_cli.replay.table import SlotTable


@dataclass(frozen=True)
class Replayed:
    """`loads` [T, L]: how many of the K experts of an event had to be loaded."""

    loads: NDArray[np.int64]
    top_k: int

    def loads_per_token(self, counted: NDArray[np.bool_] | slice) -> float:
        """Mean over the tokens that count."""
        return float(self.loads[counted].sum(axis=1).mean())

    def hit_rate(self, counted: NDArray[np.bool_] | slice) -> float:
        """Share of the lookups of these tokens that found a slot, from 0 to 1."""
        return 1 - float(self.loads[counted].mean()) / self.top_k


def replay(trace: Trace, num_slots: int, policy: Policy) -> Replayed:
    """Send all tokens through a pool that is empty at the start.

    An expert that an event wants is no victim of that event; every load gets a slot. Raises
    `ValueError` for fewer slots than an event has experts.
    """
    if num_slots < trace.top_k:
        raise ValueError(f"{num_slots} slots for events of {trace.top_k} experts")
    table = SlotTable(num_slots, trace.num_layers * trace.num_experts)
    events = flat_events(trace)
    loads = [
        table.require(wanted, score)[1]
        for wanted, score in zip(events, policy(events), strict=True)
    ]
    return Replayed(np.array(loads).reshape(len(trace), trace.num_layers), trace.top_k)


def flat_events(trace: Trace) -> NDArray[np.int64]:
    """Flat expert ids [T * L, K] in the order in which a model asks for them."""
    first = np.arange(trace.num_layers)[:, None] * trace.num_experts
    return (trace.experts.astype(np.int64) + first).reshape(-1, trace.top_k)


def slots_for(trace: Trace, percent: float) -> int:
    """The slots of `--pool percent%`."""
    return int(trace.num_layers * trace.num_experts * percent / 100 + 1e-9)
