"""Prefetch: everything that belongs to prefetching beside the kernels: its state on the device, its
thread, its rules and the switch that turns it off."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from seqmoe_cli.residency.pool import ExpertPool
from seqmoe_cli.residency.prefetcher import Copier, DmaCopier, HostCopier, Prefetcher
from seqmoe_cli.residency.switch import SETTLE, KillSwitch, StepCosts
from seqmoe_kernels import Ahead, Expectation, Flights, Routing, fetch, note_hints
from seqmoe_kernels.choice import Chosen, RecordedIds
from seqmoe_kernels.formats import (
    CERTAIN,
    COPY_NS,
    DELAY_NS,
    IN_FLIGHT,
    LAYER_NS,
    LEAST,
    MOST_KEPT,
    NUM_FLIGHTS,
    PATIENCE_NS,
    PER_LAYER,
    SLACK_NS,
)

DISTANCE = 4  # layers that look-ahead sees
COPIES_IN_FLIGHT = 2
COPIES_PER_LAYER = 2
DELAY_S = 30e-6  # from a request to its copy
SLACK = 0.5  # copies' times: landing that late still beats a fetch
LEAST_USE = 0.25  # how probable a use must be at least to be prefetched for
_UNKNOWN_NS = 10**12  # a layer's time before one was measured: everything is in time
TUNE_EVERY = 16  # steps
_MEASURED = 8  # records


def least_slots(top_k: int) -> int:
    """Slots that a pool must have for prefetch: two layers' worth, and those of copies."""
    return 2 * top_k + COPIES_IN_FLIGHT


class Prefetch:
    """Made for a pool, which from then on lands what was prefetched. Not thread-safe beside its own
    thread. `accuracy` of look-ahead is counted on the device, see `Flights`."""

    def __init__(
        self,
        pool: ExpertPool,
        num_layers: int,
        routing: Routing,
        copier: Copier | None = None,
    ) -> None:
        device, top_k = pool.slots.device, routing.top_k
        width = 1 << (top_k - 1).bit_length()
        self.flights = Flights.none(num_layers, top_k, DISTANCE, width, device)
        self.predicted: RecordedIds | None = None  # names experts in the place of the routers
        self.expectation: Expectation | None = None  # of a forecast, beside look-ahead
        self._pool, self._routing, self._num_layers = pool, routing, num_layers
        copy = copier or (DmaCopier if device.type == "cuda" else HostCopier)(
            pool.records, pool.slots, pool.state
        )
        self.copy_s, self.fetch_s = _measure(pool) if copier is None else (0.0, 0.0)
        self.switch = KillSwitch(self.fetch_s)
        self.thread = Prefetcher(self.flights, copy)
        self._most_kept = min(NUM_FLIGHTS, pool.num_slots - 2 * top_k)
        self._is_on, self._is_held, self._steps = False, False, 0
        self._step_s = self._stall_s = 0.0  # of late
        self._set_rules(_UNKNOWN_NS)
        pool.land(self.flights, self._most_kept)
        self._turn(True)
        self.thread.start()

    @property
    def is_on(self) -> bool:
        """Whether copies are asked for."""
        return self._is_on

    @property
    def status(self) -> str:
        """In a word: on, comparing (left out to see what it saves), resting (while it does not
        pay) or stopped."""
        if self.failure:
            return "stopped"
        return "on" if self.is_on else "resting" if self.switch.rests else "comparing"

    @property
    def failure(self) -> str | None:
        """Why there will be no more prefetches; None while there are."""
        return self.thread.failure

    def hold(self) -> None:
        """Stay on from now on, whether it pays or not: to be measured."""
        self._is_held = True

    def begin_step(self) -> None:
        """A step of one token begins: note whom the forecast expects, if there is one. Can be
        captured in a CUDA graph."""
        if self.expectation is not None:
            note_hints(self.expectation, self._pool.state, self.flights)

    def ahead(self, layer: int, logits: torch.Tensor, chosen: Chosen) -> Ahead:
        """What a fetch needs to ask for prefetches; `logits` are those of later routers."""
        num_experts, top_k, _ = self._routing
        hinted = self.expectation is not None
        return Ahead(logits, layer, num_experts, top_k, chosen, self.predicted, hinted)

    def observe(self, step: StepCosts) -> None:
        """Learn from a decode step: the time of a layer, whether prefetch pays, and for whom.

        What is in time is told by the computing of a layer alone: many layers do not wait, and what
        comes late for those slows down the fetches of the others. And the more of a step's time the
        link is busy with fetches, the surer a use must be: the time of a copy saves a fetch if it
        is used, and delays one if it is not, each as far as the link would have been idle or busy.
        """
        on = self._is_held or self.switch.observe(step)
        self._turn(on and self.failure is None)
        self._steps += 1
        if (num := self._steps - SETTLE) <= 0:  # kernels are compiled
            return
        share = 1 / min(num, TUNE_EVERY)
        self._step_s += share * (step.step_s - self._step_s)
        self._stall_s += share * (step.stall_s - self._stall_s)
        if num % TUNE_EVERY == 0:
            self._tune()

    def _tune(self) -> None:
        layer_s = (self._step_s - self._stall_s) / self._num_layers
        busy = self._stall_s / self._step_s if self._step_s else 0.0
        self._rule(LAYER_NS, round(1e9 * layer_s))
        self._rule(LEAST, round(max(busy, LEAST_USE) * CERTAIN))

    def accuracy(self) -> list[tuple[int, int, int]]:
        """For 1, 2, ... layers ahead: experts that would have been misses, that were named while
        absent, and that were both (waits for the device)."""
        return [(row[0], row[1], row[2]) for row in self.flights.accuracy.tolist()]

    def close(self) -> None:
        """End the thread. The device may not run any more steps."""
        self.thread.close()

    def _turn(self, on: bool) -> None:
        """While it is off, the kernels are those of an engine without prefetch, and slots that
        copies are under way to stay out of use."""
        if self._is_on and not on:
            self._pool.disown()
        self._is_on = on
        self._pool.flights = self.flights if on else None

    def _set_rules(self, layer_ns: int) -> None:
        copy_ns = round(self.copy_s * 1e9)
        values = {
            IN_FLIGHT: COPIES_IN_FLIGHT,
            PER_LAYER: COPIES_PER_LAYER,
            MOST_KEPT: self._most_kept,
            LAYER_NS: layer_ns,
            COPY_NS: copy_ns,
            DELAY_NS: round(DELAY_S * 1e9),
            SLACK_NS: round(SLACK * copy_ns),
            PATIENCE_NS: round(1e9 * self.fetch_s),  # for longer, a fetch is better
            LEAST: round(LEAST_USE * CERTAIN),
        }
        for rule, value in values.items():
            self._rule(rule, value)

    def _rule(self, rule: int, value: int) -> None:
        self.flights.rules[rule : rule + 1].fill_(value)


def _measure(pool: ExpertPool) -> tuple[float, float]:
    """Seconds that a record takes by a copy and by a fetch, when several follow one another into
    empty slots of a cold pool."""
    num, device = min(_MEASURED, pool.num_slots), pool.slots.device
    places = torch.arange(num, dtype=torch.int32, device=device)
    count, marks = places.new_full((1,), num), pool.state.marks.clone()

    def copy() -> None:
        for i in range(num):
            pool.slots[i].copy_(pool.records[i], non_blocking=True)

    def fetch_all() -> None:
        fetch(pool.records, pool.slots, places, places, count, marks)

    def seconds(work: Callable[[], None]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / num

    # the first run of each is slow, and compiles
    return min(seconds(copy) for _ in range(3)), min(seconds(fetch_all) for _ in range(3))
