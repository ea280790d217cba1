"""Replay: it decides as the engine's pool does, Belady's loads are the fewest possible, and the
published figures of two traces come out."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmoe_cli.forecast.shipped import open_trace
from seqmoe_cli.forecast.trace import DECODE, Trace
from seqmoe_cli.residency.policies import Ints
from seqmoe_cli.residency.pool import ExpertPool
from seqmoe_kernels import begin_step
from tests.traces import random_trace
from tools.simulator.events import TraceEvents
from tools.simulator.importers import read_delta_npy
from tools.simulator.policies import S3Fifo, WindowedBelady, belady, lru
from tools.simulator.replay import PolicyOf, replay, slots_for
from tools.simulator.scores import DecayedFrequency
from tools.simulator.slot_table import SlotTable

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here")


@pytest.mark.parametrize("num_slots", [3, 7, 16, 40])
def test_decayed_frequency_is_the_engines(num_slots: int) -> None:
    """Every event gives the same slots as `ExpertPool`, and again after it was made cold."""
    trace = random_trace(num_slots, 60, 4, 10, 3)
    records, cpu = torch.zeros(40, 256, dtype=torch.uint8), torch.device("cpu")
    pool = ExpertPool(num_slots, records, cpu, policy="decayed")
    differs = False
    for _ in range(2):
        pool.reset()
        policy, by_use = DecayedFrequency(40), lru(TraceEvents(trace), num_slots)
        table, other = SlotTable(num_slots, 40), SlotTable(num_slots, 40)
        for number, wanted in enumerate(TraceEvents(trace).events):
            if number % 4 == 0:  # a step of four layers
                begin_step(pool.state)
                policy.start_token(number // 4 + 1)
            barred = np.empty(0, np.int64)
            slots, _ = table.require(wanted, policy, barred)
            policy.use(0, wanted)
            assert slots.tolist() == pool.require(torch.from_numpy(wanted).int()).tolist()
            differs |= slots.tolist() != other.require(wanted, by_use, barred)[0].tolist()
            by_use.use(0, wanted)
        assert table.owner.tolist() == pool.state.owner.tolist()
    assert differs == (num_slots < 40)  # LRU chooses others where there is a choice


@pytest.mark.parametrize("num_slots", [3, 7, 16, 40])
def test_lru_is_the_engines(num_slots: int) -> None:
    """Every event gives the same slots as `ExpertPool`, and leaves the same owners behind."""
    trace = random_trace(num_slots, 60, 4, 10, 3)
    events = TraceEvents(trace).events
    policy, unbarred = lru(TraceEvents(trace), num_slots), np.empty(0, np.int64)
    pool = ExpertPool(num_slots, torch.zeros(40, 256, dtype=torch.uint8), torch.device("cpu"))
    table = SlotTable(num_slots, 40)
    loads = 0
    for wanted in events:
        slots, loaded = table.require(wanted, policy, unbarred)
        policy.use(0, wanted)
        assert slots.tolist() == pool.require(torch.from_numpy(wanted).int()).tolist()
        assert table.owner.tolist() == pool.state.owner.tolist()
        assert table.slot_of.tolist() == pool.state.slot_of.tolist()
        loads += len(loaded)
    assert pool.counters()[:2] == [events.size - loads, loads]
    assert loads == replay(trace, num_slots, lru).loads.sum()


def fewest_loads(events: Ints, num_slots: int) -> int:
    """By trying every choice of victims."""
    wanted = [frozenset(event.tolist()) for event in events]

    @cache
    def rest(n: int, held: frozenset[int]) -> int:
        if n == len(wanted):
            return 0
        missed = wanted[n] - held
        spare = len(held) + len(missed) - num_slots
        victims = combinations(sorted(held - wanted[n]), max(spare, 0))
        return len(missed) + min(rest(n + 1, held - set(v) | missed) for v in victims)

    return rest(0, frozenset())


event_lists = st.integers(1, 3).flatmap(
    lambda k: st.lists(
        st.lists(st.integers(0, 6), min_size=k, max_size=k, unique=True), min_size=1, max_size=9
    )
)


@settings(deadline=None, max_examples=80)
@given(event_lists, st.integers(3, 5))
def test_belady_loads_least(events: list[list[int]], num_slots: int) -> None:
    trace = Trace(
        "any", "none", 7, np.array(events, np.uint8)[:, None],
        np.zeros(len(events), np.uint32), np.ones(len(events), np.uint8),
    )  # fmt: skip
    best = replay(trace, num_slots, belady).loads.sum()
    assert best == fewest_loads(TraceEvents(trace).events, num_slots)
    assert best <= replay(trace, num_slots, lru).loads.sum()


def test_figures_of_a_pool_by_hand() -> None:
    """Two layers of three experts, three slots. Token 1 finds both of its experts, token 2 the
    one of layer 0 alone."""
    trace = Trace(
        "hand", "none", 3, np.array([[[0], [1]], [[0], [1]], [[0], [2]], [[1], [1]]], np.uint8),
        np.zeros(4, np.uint32), np.array([0, 1, 1, 1], np.uint8),
    )  # fmt: skip
    done = replay(trace, 3, lru)
    assert TraceEvents(trace).events[:2].tolist() == [[0], [4]]
    assert done.loads.tolist() == [[1, 1], [0, 0], [0, 1], [1, 1]]
    assert done.loads_per_token(slice(1, None)) == 1.0
    assert done.hit_rate(trace.phase == DECODE) == 0.5
    assert replay(trace, 3, belady).loads.tolist() == [[1, 1], [0, 0], [0, 1], [1, 0]]
    with pytest.raises(ValueError, match="0 slots"):
        replay(trace, 0, lru)


def test_slots_are_counted_as_the_memory_plan_does() -> None:
    trace = random_trace(0, 1, 10, 16, 2)
    assert [slots_for(trace, share) for share in (15, 25, 35, 45, 100)] == [24, 40, 56, 72, 160]
    assert slots_for(random_trace(0, 1, 3, 8, 2), 45) == 10  # of 24


def check(trace: Trace, first: int, rows: list[tuple[int, PolicyOf, float, float]]) -> None:
    """Figures as published, one decimal. Experts of one event have been used at the same time;
    which of them leaves first is not said, and moves the loads by less than a tenth."""
    for share, policy, hits, loads in rows:
        done = replay(trace, slots_for(trace, share), policy)
        assert round(100 * done.hit_rate(slice(first, None)), 1) == pytest.approx(hits, abs=0.051)
        assert done.loads_per_token(slice(first, None)) == pytest.approx(loads, abs=0.1)


def decayed(routing: TraceEvents, num_slots: int) -> DecayedFrequency:
    return DecayedFrequency(routing.num_experts)


def s3fifo(routing: TraceEvents, num_slots: int) -> S3Fifo:
    return S3Fifo(num_slots)


def seeing(window: int) -> PolicyOf:
    return lambda routing, num_slots: WindowedBelady(routing, window, 16.0)


@pytest.mark.parametrize("num_slots", [8, 20, 30])
def test_the_more_is_seen_the_fewer_loads(num_slots: int) -> None:
    trace = random_trace(num_slots, 80, 4, 10, 3)
    loads = {name: replay(trace, num_slots, make).loads.sum() for name, make in (
        ("blind", decayed), ("some", seeing(4)), ("all", seeing(80)), ("belady", belady),
    )}  # fmt: skip
    assert loads["all"] == loads["belady"] <= loads["some"] <= loads["blind"]
    assert loads["belady"] < loads["blind"]


def test_s3fifo_by_hand() -> None:
    """Ten slots, one of them the small queue's; an expert used again in it moves on, one that is
    not leaves by the ghost queue, which brings it into the main queue the next time."""
    policy, owner, none = S3Fifo(10), np.full(10, -1), np.empty(0, np.int64)

    def want(expert: int) -> int:
        """The expert that leaves for this one; -1: it has an empty slot or is there."""
        gone = -1
        if expert not in owner:
            [slot] = policy.victims(owner, none, np.array([expert]))
            gone, owner[slot] = int(owner[slot]), expert
        policy.use(0, np.array([expert]))
        return gone

    assert [want(e) for e in range(10)] == [-1] * 10
    assert want(0) == -1  # used again
    assert want(10) == 1  # 0 went to the main queue, 1 was the next
    assert [want(e) for e in (11, 12)] == [2, 3]
    assert want(1) == 4  # known to the ghost queue, so behind 0 in the main queue
    assert [want(e) for e in range(13, 20)] == [5, 6, 7, 8, 9, 10, 11]
    assert 0 in owner and 1 in owner


@pytest.mark.parametrize("num_slots", [3, 7, 16, 40])
@pytest.mark.parametrize("policy", [decayed, s3fifo, seeing(2)])
def test_no_policy_is_better_than_belady(policy: PolicyOf, num_slots: int) -> None:
    trace = random_trace(num_slots, 60, 4, 10, 3)
    loads = replay(trace, num_slots, policy).loads.sum()
    assert replay(trace, num_slots, belady).loads.sum() <= loads
    assert (loads < trace.experts.size) == (num_slots > 3)


def test_published_figures_of_qwen3() -> None:
    trace = open_trace("qwen3")
    trace = trace.select(trace.phase == DECODE)
    assert len(trace) == 128
    check(
        trace,
        64,
        [
            (15, lru, 64.3, 102.7), (15, belady, 82.9, 49.1),
            (25, lru, 82.0, 51.9), (25, belady, 92.5, 21.7),
            (35, lru, 92.8, 20.8), (35, belady, 96.8, 9.3),
            (45, lru, 96.5, 10.1), (45, belady, 96.8, 9.3),
        ],
    )  # fmt: skip


@needs_shared
def test_published_figures_of_the_twin() -> None:
    trace = read_delta_npy(SHARED / "twin" / "twin_routes0.npy.xz", 128, 24)
    trace = trace.select(trace.sequence < 6)
    check(
        trace,
        400,
        [
            (25, lru, 48.9, 196.2), (25, belady, 75.7, 93.4),
            (45, lru, 72.2, 106.9), (45, belady, 89.5, 40.2),
        ],
    )  # fmt: skip
