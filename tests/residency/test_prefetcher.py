"""The prefetch thread, and the protocol against a model of it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmoe_cli.residency import prefetcher
from seqmoe_cli.residency.pool import ExpertPool
from seqmoe_cli.residency.prefetcher import Copier, HostCopier, Prefetcher
from seqmoe_kernels import (
    Flights,
    Handover,
    Predictions,
    RecordedIds,
    Request,
    Routing,
    choose,
    read_request,
    schedule_prefetches,
)
from seqmoe_kernels.state import (
    DROPPED,
    EMPTY,
    FETCHING,
    HITS,
    IN_FLIGHT,
    LANDED,
    LAYER_NS,
    MISSES,
    MOST_KEPT,
    NO_VICTIM,
    PER_LAYER,
    PREFETCH_HITS,
    PREFETCHES,
    READY,
)

CPU = torch.device("cpu")
LAYERS, EXPERTS, TOP_K, DISTANCES, NAMES = 4, 6, 2, 4, 2
RECORDS = torch.arange(LAYERS * EXPERTS, dtype=torch.uint8).unsqueeze(1).repeat(1, 256)


class Small:
    """A pool that prefetches, driven layer by layer with what is wanted and predicted."""

    def __init__(self, num_slots: int, in_flight: int = 2) -> None:
        self.pool = ExpertPool(num_slots, RECORDS, CPU)
        self.flights = Flights.none(LAYERS, TOP_K, DISTANCES, NAMES, CPU)
        self.handover = Handover.idle(LAYERS, EXPERTS, TOP_K, DISTANCES, CPU)
        kept = max(num_slots - 2 * TOP_K, 0)
        values = {IN_FLIGHT: in_flight, PER_LAYER: 2, MOST_KEPT: kept, LAYER_NS: 10**15}
        for rule, value in values.items():
            self.flights.rules[rule] = value
        self.pool.land(self.flights, kept)
        self.layer = 0

    def event(self, wanted: tuple[int, int], named: list[tuple[int, int]]) -> torch.Tensor:
        """The bytes [K] that the kernels behind this event would read."""
        routing, step = Routing(EXPERTS, TOP_K, True), torch.zeros(1, dtype=torch.int64)
        recorded = RecordedIds(torch.tensor(wanted).int().expand(1, LAYERS, 2).contiguous(), step)
        ids = torch.full((1, LAYERS, DISTANCES, NAMES), -1, dtype=torch.int32)
        for d, row in enumerate(named):
            ids[0, self.layer, d] = torch.tensor(row)
        logits, state, flights = torch.zeros(1, EXPERTS), self.pool.state, self.flights
        handover, layer = self.handover, self.layer
        chosen = choose(
            logits, layer, routing, state, recorded, flights, None, handover.used, handover
        )
        slots = self.pool.fetch(chosen.wanted, chosen.resolved, handover.free_behind(layer))
        predictions = Predictions(EXPERTS, NAMES, RecordedIds(ids, step))
        schedule_prefetches(predictions, state, flights, handover)
        self.layer = (self.layer + 1) % LAYERS
        assert (slots >= 0).all()
        return self.pool.slots[slots.long(), 0] - (chosen.wanted - torch.tensor(wanted))


pairs = st.lists(st.integers(0, EXPERTS - 1), min_size=2, max_size=2, unique=True)
host = st.sampled_from(["copy", "late", "refuse", "half", "old", "lose", "nothing", "reset"])
moves = st.lists(
    st.tuples(pairs, st.lists(pairs, max_size=4), st.lists(host, max_size=2)), min_size=6
)


@settings(deadline=None, max_examples=150)
@given(moves, st.integers(2 * TOP_K, 14))
def test_no_interleaving_breaks_the_protocol(
    moves: list[tuple[list[int], list[list[int]], list[str]]], num_slots: int
) -> None:
    """Whatever is done with the requests, the bytes read are those of the experts
    wanted, and lookup table, owners, states and tags agree."""
    small, asked, next_number = Small(num_slots), deque[Request](), 0
    state, tags = small.pool.state, torch.zeros(num_slots, dtype=torch.int64)
    for wanted, named, deeds in moves:
        read = small.event((wanted[0], wanted[1]), [(n[0], n[1]) for n in named])
        assert read.tolist() == wanted
        check(small)
        assert (state.assigned_tag >= tags).all()  # a tag never comes again
        tags = state.assigned_tag.clone()
        while (request := read_request(small.flights.requests, next_number)) is not None:
            asked.append(request)
            next_number += 1
        for deed in deeds:
            serve(small, asked, deed)
    assert state.counters[HITS] + state.counters[MISSES] == TOP_K * len(moves)
    assert state.counters[PREFETCHES] == next_number and state.counters[NO_VICTIM] == 0


def serve(small: Small, asked: deque[Request], deed: str) -> None:
    """What may become of requests, each once; or the pool is made cold meanwhile."""
    if deed == "reset":
        small.pool.reset()
    if deed in ("nothing", "reset") or not asked:
        return
    if deed == "late":
        asked.rotate(1)
        return
    request = asked.popleft()
    slots, landed = small.pool.slots, small.pool.state.landed_tag
    if deed == "half":  # broken off: some bytes are there, the tag is not
        slots[request.slot, :100] = request.expert
    elif deed == "old":  # a tag of before
        landed[request.slot] = request.tag - 1
    elif deed == "refuse":
        landed[request.slot] = -request.tag
    elif deed == "copy":
        slots[request.slot] = RECORDS[request.expert]
        landed[request.slot] = request.tag


def check(small: Small) -> None:
    state = small.pool.state
    flights = [slot for slot in small.flights.slot.tolist() if slot >= 0]
    under_way = [slot for slot in flights if state.state[slot] == FETCHING]
    assert len(set(flights)) == len(flights) and len(under_way) <= 2
    for slot, (owner, kind) in enumerate(
        zip(state.owner.tolist(), state.state.tolist(), strict=True)
    ):
        assert (kind == FETCHING) == (slot in under_way)
        if kind == READY:
            assert state.slot_of[owner] == slot
            assert state.assigned_tag[slot] == state.landed_tag[slot]
            assert (small.pool.slots[slot] == owner).all()
        else:
            assert (state.slot_of != slot).all()
            assert kind != EMPTY or owner == -1


def until(done: Callable[[], bool]) -> None:
    for _ in range(5000):
        if done():
            return
        time.sleep(0.001)
    raise AssertionError("it never came")


def threaded(small: Small, copier: Copier | None = None) -> Prefetcher:
    pool = small.pool
    thread = Prefetcher(small.flights, copier or HostCopier(pool.records, pool.slots, pool.state))
    thread.start()
    return thread


def test_the_thread_brings_what_is_asked_for() -> None:
    small = Small(10)
    thread = threaded(small)
    small.event((0, 1), [(3, 4)])
    until(lambda: thread.num_copied == 2)
    until(lambda: bool((small.pool.state.landed_tag == small.pool.state.assigned_tag).all()))
    assert small.event((3, 4), []).tolist() == [3, 4]
    assert small.pool.counters()[:2] == [2, 2] and small.pool.counters()[PREFETCH_HITS] == 2
    thread.close()


def test_the_thread_pauses_while_misses_are_served() -> None:
    small = Small(10)
    small.event((0, 1), [(3, 4)])
    small.flights.control.fill_(int(small.pool.state.clock) * 2 + 1)
    thread = threaded(small)
    time.sleep(0.05)
    assert thread.num_copied == 0
    small.flights.control.sub_(1)
    until(lambda: thread.num_copied == 2)
    thread.close()


def test_the_thread_refuses_what_is_over() -> None:
    small = Small(10)
    small.event((0, 1), [(3, 4)])
    small.event((5, 2), [])
    small.event((5, 2), [])
    thread = threaded(small)
    until(lambda: int((small.pool.state.landed_tag < 0).sum()) == 2)
    thread.close()
    small.event((0, 1), [])
    assert thread.num_copied == 0 and small.pool.counters()[LANDED] == 0
    assert not (small.pool.state.state == FETCHING).any()


class Broken(HostCopier):
    def start(self, request: Request, refuse: bool) -> None:
        raise RuntimeError("out of order")


def test_a_dead_thread_is_told_and_misses_go_on() -> None:
    small = Small(10)
    pool = small.pool
    thread = threaded(small, Broken(pool.records, pool.slots, pool.state))
    small.event((0, 1), [(3, 4)])
    until(lambda: thread.failure is not None)
    assert thread.failure == "RuntimeError: out of order"
    for _ in range(6):
        assert small.event((3, 4), [(0, 1), (1, 2)]).tolist() == [3, 4]
    assert pool.counters()[DROPPED] == 2
    thread.close()


class Hanging(HostCopier):
    """Until it is let go."""

    go = threading.Event()

    def start(self, request: Request, refuse: bool) -> None:
        assert self.go.wait(20)
        super().start(request, refuse)


def test_a_thread_that_hangs_is_told_and_misses_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetcher, "_STUCK_S", 0.2)
    small = Small(10)
    pool = small.pool
    thread = threaded(small, Hanging(pool.records, pool.slots, pool.state))
    small.event((0, 1), [(3, 4)])
    until(lambda: thread.failure is not None)
    assert "no copy has ended for" in (thread.failure or "") and thread.died is None
    assert small.event((3, 4), []).tolist() == [3, 4]
    Hanging.go.set()
    until(lambda: thread.failure is None)
    thread.close()


def test_closing_ends_the_thread() -> None:
    thread = threaded(Small(10))
    thread.close()
    assert "prefetcher" not in [t.name for t in threading.enumerate()]
