"""Replay of a trace: one pool for all layers, an event for each (token, layer), and its time.

T tokens, L layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seqmoe_cli.forecast.trace import Trace
from seqmoe_cli.residency.policies import Ints
from tools.simulator.events import TraceEvents
from tools.simulator.flight import Flight, PrefetchRules
from tools.simulator.forecast_eviction import Blend
from tools.simulator.link import Link, clock_of
from tools.simulator.scores import Policy
from tools.simulator.slot_table import SlotTable

PolicyOf = Callable[[TraceEvents, int], Policy]
"""Makes a fresh policy for a trace and a number of slots."""
Counted = NDArray[np.bool_] | slice


@dataclass(frozen=True)
class Replayed:
    """What happened, event by event or token by token.

    `loads` [T, L]: how many of the K experts of an event had to be fetched. `late` [T, L]: how many
    were waited for, their copy being on the link. `copies` [T]: prefetches asked for during a
    token; `used` [T]: how many of these made a hit in time; `unmoved` [T]: what did not come of
    those that were cut short, in records and parts of them. `stall_s` [T]: time lost to fetches
    and to waiting.
    """

    loads: Ints
    late: Ints
    copies: Ints
    used: Ints
    unmoved: NDArray[np.float64]
    stall_s: NDArray[np.float64]
    top_k: int

    def loads_per_token(self, counted: Counted) -> float:
        """Records that came over the link, prefetched ones too, whole or in part; mean over the
        tokens that count."""
        return float((self.loads.sum(axis=1) + self.copies - self.unmoved)[counted].mean())

    def hit_rate(self, counted: Counted) -> float:
        """Share of the lookups of these tokens that found a slot in time, from 0 to 1."""
        return 1 - float((self.loads + self.late)[counted].mean()) / self.top_k


def replay(
    trace: Trace | TraceEvents,
    num_slots: int,
    policy: PolicyOf,
    link: Link | None = None,
    prefetching: PrefetchRules | None = None,
    blend: Blend | None = None,
) -> Replayed:
    """Send all tokens through a pool that is empty at the start.

    An expert that an event wants is no victim of that event; every load gets a slot. `blend` is
    driven along, for the policy or the prefetch that looks at it. Raises `ValueError` for fewer
    slots than an event has experts.
    """
    routing = TraceEvents(trace) if isinstance(trace, Trace) else trace
    if num_slots < routing.trace.top_k:
        raise ValueError(f"{num_slots} slots for events of {routing.trace.top_k} experts")
    made = policy(routing, num_slots)
    listeners: list[Blend | Policy] = [blend, made] if blend else [made]
    run = _Run(routing, num_slots, made, link or Link(), prefetching or PrefetchRules())
    for token in range(len(routing.trace)):
        run.flight.start_token(token)
        for listener in listeners:
            listener.start_token(token)
        for layer in range(routing.num_layers):
            wanted = run.event(token, layer)
            for listener in listeners:
                listener.use(layer, wanted)
            run.after(token, layer, wanted)
    return run.done


class _Run:
    """The state of a replay, and what it has counted so far."""

    def __init__(
        self, routing: TraceEvents, num_slots: int, policy: Policy, link: Link, rules: PrefetchRules
    ) -> None:
        tokens, layers, top_k = routing.trace.experts.shape
        self._routing, self._policy, self._source = routing, policy, rules.source
        self._table, self._clock = SlotTable(num_slots, routing.num_experts), clock_of(link)
        self.flight = Flight(self._table, self._clock, policy, rules, top_k)
        loads, late = np.zeros((2, tokens, layers), np.int64)
        copies, used = np.zeros((2, tokens), np.int64)
        unmoved, stall_s = np.zeros((2, tokens))
        self.done = Replayed(loads, late, copies, used, unmoved, stall_s, top_k)

    def event(self, token: int, layer: int) -> Ints:
        """A layer gets its experts, whatever time that takes."""
        began = self._clock.now
        event = token * self._routing.num_layers + layer
        wanted: Ints = self._routing.events[event]
        self.flight.land()
        waiting = self.flight.late(wanted)
        late = np.array([copy.expert for copy in waiting], np.int64)
        here = wanted[~np.isin(wanted, late)] if waiting else wanted
        _, loads = self._table.require(here, self._policy, self.flight.barred())
        if len(loads):
            self._clock.fetch(len(loads))
        if waiting:
            self._clock.wait(waiting)
        self.flight.land()
        used = self.flight.passed(event, wanted, np.concatenate((late, loads)))
        self.done.loads[token, layer], self.done.late[token, layer] = len(loads), len(waiting)
        for asked in used:
            self.done.used[asked] += 1
        for copy in self.flight.cut(event):
            self.done.unmoved[copy.token] += copy.left
        self.done.stall_s[token] += self._clock.now - began
        if self._source:
            self._source.missed(event, len(loads) + len(waiting) + len(used))
        return wanted

    def after(self, token: int, layer: int, wanted: Ints) -> None:
        """Prefetches are asked for, and the layer is computed."""
        event = token * self._routing.num_layers + layer
        self.done.copies[token] += self.flight.request(event, wanted)
        self._clock.run(self._clock.now + self._clock.link.layer_s)


def slots_for(trace: Trace, percent: float) -> int:
    """The slots of `--pool percent%`."""
    return int(trace.num_layers * trace.num_experts * percent / 100 + 1e-9)
