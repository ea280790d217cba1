"""Prefetch: all that belongs to prefetching beside the kernels: its state on the device, what
copies, its rules and the switch that turns it off."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from seqmoe_cli.residency.pool import ExpertPool
from seqmoe_cli.residency.prefetcher import Copier, DmaCopier, HostCopier, Prefetcher
from seqmoe_cli.residency.stats import StepStats
from seqmoe_cli.residency.switch import Lengths, PrefetchVerdict, Switch
from seqmoe_kernels import (
    Flights,
    Handover,
    Predictions,
    Resolved,
    Routing,
    StepForecast,
    copy_prefetches,
    fetch,
    pick_candidates,
    schedule_prefetches,
)
from seqmoe_kernels.eviction.expected_use import ExpectedUse
from seqmoe_kernels.pool.choose import RecordedIds
from seqmoe_kernels.state import (
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


class Carrier(NamedTuple):
    """How copies are asked for. `in_flight`: under way at once; `per_layer`: asked for behind one
    layer; `delay_s`: until one starts; `slack`: in times of a copy, landing that late is worth it;
    `patience`: in times of a fetch, for how long a late one is waited for."""

    in_flight: int
    per_layer: int
    delay_s: float
    slack: float
    patience: float


# A thread lets fetches pass, and is better dropped when it is late. What the copy kernel has copied
# is there for good, and the rest of it comes as fast as a fetch.
CARRIERS = {"thread": Carrier(2, 2, 30e-6, 0.5, 1.0), "gpu": Carrier(2, 1, 10e-6, 1.0, 4.0)}
MOST_IN_FLIGHT = max(carrier.in_flight for carrier in CARRIERS.values())
LEAST_USE = 0.25  # how probable a use must be at least to be prefetched for
_UNKNOWN_NS = 10**12  # a layer's time before one was measured: everything is in time
TUNE_EVERY = 16  # steps
_MEASURED = 8  # records
_GIVE_UPS = 8  # of the schedule kernel, in steps one after the other: then it is not queued again


def least_slots(top_k: int) -> int:
    """Slots that a pool must have for prefetch: two layers' worth, and those of copies."""
    return 2 * top_k + MOST_IN_FLIGHT


class Sources(Protocol):
    """What a step has to ask by: `predicted` experts in the place of the routers' look-ahead; a
    forecast to pick `candidates` from; the `expected_use` by which victims are chosen."""

    @property
    def predicted(self) -> RecordedIds | None: ...
    @property
    def candidates(self) -> StepForecast | None: ...
    @property
    def expected_use(self) -> ExpectedUse | None: ...


class Prefetch:
    """Made for a pool, which from then on lands what was prefetched. `by` "gpu": kernels beside
    those of a step ask and copy, `ask` and `copy`; "thread": a thread of the host copies what is
    asked for. `accuracy` of look-ahead is counted on the device, see `Flights`."""

    def __init__(
        self,
        pool: ExpertPool,
        num_layers: int,
        routing: Routing,
        by: str = "thread",
        used: torch.Tensor | None = None,
    ) -> None:
        """`used`, int32 [L * K]: where the experts of a step are noted, if a predictor reads them
        there."""
        device, (num_experts, top_k, _) = pool.slots.device, routing
        width, beside = 1 << (top_k - 1).bit_length(), by == "gpu"
        self.flights = Flights.none(num_layers, top_k, DISTANCE, width, device, beside)
        self.handover = Handover.idle(num_layers, num_experts, top_k, DISTANCE, device)
        if used is not None:
            self.handover = self.handover._replace(used=used)
        self._pool, self._routing, self._num_layers = pool, routing, num_layers
        self._carrier = CARRIERS[by]
        self.copy_s, self.fetch_s = _measure(pool)
        self.switch = Switch(lambda on, off: PrefetchVerdict.of(on, off, self.fetch_s))
        self.thread: Prefetcher | None = None
        if not beside:
            copier: Copier = (DmaCopier if device.type == "cuda" else HostCopier)(
                pool.records, pool.slots, pool.state
            )
            self.thread = Prefetcher(self.flights, copier)
        self._most_kept = min(NUM_FLIGHTS, pool.num_slots - 2 * top_k)
        self._is_on, self._steps = False, 0
        self._step_s = self._stall_s = 0.0  # of late
        self._gave_up = 0  # steps of late
        self._set_rules(_UNKNOWN_NS)
        pool.land(self.flights, self._most_kept)
        self._turn(True)
        if self.thread is not None:
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
        return self.switch.status

    @property
    def failure(self) -> str | None:
        """Why there will be no more prefetches; None while there are."""
        if self._gave_up >= _GIVE_UPS:
            return "the GPU does not run its kernels beside the others; use --prefetch off"
        return None if self.thread is None else self.thread.failure

    def begin_step(self, forecast: StepForecast | None) -> None:
        """A step of one token begins: pick candidates from its forecast, if there is one. Can be
        captured in a CUDA graph."""
        if forecast is not None:
            pick_candidates(forecast, self._pool.state, self.flights)

    def ask(self, sources: Sources) -> None:
        """The schedule kernel, to be queued beside a step's kernels behind its first layer; on a
        CPU, to be called behind every layer."""
        num_experts, top_k, _ = self._routing
        candidates = sources.candidates is not None
        predictions = Predictions(num_experts, top_k, sources.predicted, candidates)
        state, expected_use = self._pool.state, sources.expected_use
        schedule_prefetches(predictions, state, self.flights, self.handover, expected_use)

    def copy(self) -> None:
        """The copy kernel, to be queued likewise, beside both, if there is no thread."""
        pool = self._pool
        copy_prefetches(pool.records, pool.slots, pool.state, self.flights, self.handover)

    def observe(self, step: StepStats) -> None:
        """Learn from a decode step: the time of a layer, whether prefetch pays, and for which uses;
        and whether the prefetch kernels gave up before its end.

        What is in time is told by the computing of a layer alone: many layers do not wait, and what
        comes late for those slows down the fetches of the others. And the more of a step's time the
        link is busy with fetches, the surer a use must be for a thread to copy: the time of a copy
        saves a fetch if it is used, and delays one if it is not, each as far as the link would have
        been idle or busy. The copy kernel delays none.
        """
        if self.is_on:
            self._gave_up = (self._gave_up + 1) * (step.gave_up > 0)
        self._turn(self.switch.observe(step) and self.failure is None)
        self._steps += 1
        if (num := self._steps - Lengths().settle) <= 0:  # kernels are compiled
            return
        share = 1 / min(num, TUNE_EVERY)
        self._step_s += share * (step.step_s - self._step_s)
        self._stall_s += share * (step.stall_s - self._stall_s)
        if num % TUNE_EVERY == 0:
            self._tune()

    def _tune(self) -> None:
        layer_s = (self._step_s - self._stall_s) / self._num_layers
        busy = self._stall_s / self._step_s if self._step_s and self.thread else 0.0
        self._rule(LAYER_NS, round(1e9 * layer_s))
        self._rule(LEAST, round(max(busy, LEAST_USE) * CERTAIN))

    def accuracy(self) -> list[tuple[int, int, int]]:
        """For 1, 2, ... layers ahead: experts that would have been misses, those predicted
        while absent, and those that were both (waits for the device)."""
        return [(row[0], row[1], row[2]) for row in self.flights.accuracy.tolist()]

    def close(self) -> None:
        """End the thread. The device may not run any more steps."""
        if self.thread is not None:
            self.thread.close()

    def _turn(self, on: bool) -> None:
        """While it is off, the kernels are those of an engine without prefetch, and slots that
        copies are under way to stay out of use."""
        if self._is_on and not on:
            self._pool.disown()
        self._is_on = on
        self._pool.flights = self.flights if on else None

    def _set_rules(self, layer_ns: int) -> None:
        in_flight, per_layer, delay_s, slack, patience = self._carrier
        copy_ns = round(self.copy_s * 1e9)
        values = {
            IN_FLIGHT: in_flight,
            PER_LAYER: per_layer,
            MOST_KEPT: self._most_kept,
            LAYER_NS: layer_ns,
            COPY_NS: copy_ns,
            DELAY_NS: round(delay_s * 1e9),
            SLACK_NS: round(slack * copy_ns),
            PATIENCE_NS: round(patience * self.fetch_s * 1e9),
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
        fetch(pool.records, pool.slots, Resolved(places, places, places, count), marks)

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
