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
from numpy.typing import NDArray

from seqmoe_cli.forecast.importers import read_delta_npy, read_route_csv
from seqmoe_cli.forecast.trace import DECODE, Trace
from seqmoe_cli.replay.policies import Policy, belady, lru
from seqmoe_cli.replay.replay import flat_events, replay, slots_for
from seqmoe_cli.replay.table import SlotTable
from seqmoe_cli.residency.pool import ExpertPool

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here")


def random_trace(seed: int, tokens: int, layers: int, num_experts: int, top_k: int) -> Trace:
    """Routing with favourites, so that pools of every size have hits and misses."""
    rng = np.random.default_rng(seed)
    chances = rng.dirichlet(np.full(num_experts, 0.5), layers) + 1e-3
    chances /= chances.sum(1, keepdims=True)
    picks = [
        [rng.choice(num_experts, top_k, False, chances[layer]) for layer in range(layers)]
        for _ in range(tokens)
    ]
    return Trace(
        model="random",
        family="none",
        num_experts=num_experts,
        experts=np.array(picks, np.uint8),
        sequence=np.zeros(tokens, np.uint32),
        phase=np.ones(tokens, np.uint8),
    )


@pytest.mark.parametrize("num_slots", [3, 7, 16, 40])
def test_lru_is_the_engines(num_slots: int) -> None:
    """Every event gives the same slots as `ExpertPool`, and leaves the same owners behind."""
    trace = random_trace(num_slots, 60, 4, 10, 3)
    events = flat_events(trace)
    pool = ExpertPool(num_slots, torch.zeros(40, 256, dtype=torch.uint8), torch.device("cpu"))
    table = SlotTable(num_slots, 40)
    loads = 0
    for wanted, score in zip(events, lru(events), strict=True):
        slots, num_loads = table.require(wanted, score)
        assert slots.tolist() == pool.require(torch.from_numpy(wanted).int()).tolist()
        assert table.owner.tolist() == pool.state.owner.tolist()
        assert table.slot_of.tolist() == pool.state.slot_of.tolist()
        loads += num_loads
    assert pool.counters()[:2] == (events.size - loads, loads)
    assert loads == replay(trace, num_slots, lru).loads.sum()


def fewest_loads(events: NDArray[np.int64], num_slots: int) -> int:
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
    assert best == fewest_loads(flat_events(trace), num_slots)
    assert best <= replay(trace, num_slots, lru).loads.sum()


def test_figures_of_a_pool_by_hand() -> None:
    """Two layers of three experts, three slots. Token 1 finds both of its experts, token 2 the
    one of layer 0 alone."""
    trace = Trace(
        "hand", "none", 3, np.array([[[0], [1]], [[0], [1]], [[0], [2]], [[1], [1]]], np.uint8),
        np.zeros(4, np.uint32), np.array([0, 1, 1, 1], np.uint8),
    )  # fmt: skip
    done = replay(trace, 3, lru)
    assert flat_events(trace)[:2].tolist() == [[0], [4]]
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


def check(trace: Trace, first: int, rows: list[tuple[int, Policy, float, float]]) -> None:
    """Figures as published, one decimal. Experts of one event have been used at the same time;
    which of them leaves first is not said, and moves the loads by less than a tenth."""
    for share, policy, hits, loads in rows:
        done = replay(trace, slots_for(trace, share), policy)
        assert round(100 * done.hit_rate(slice(first, None)), 1) == pytest.approx(hits, abs=0.051)
        assert done.loads_per_token(slice(first, None)) == pytest.approx(loads, abs=0.1)


@needs_shared
def test_published_figures_of_qwen3() -> None:
    trace = read_route_csv(SHARED / "qwen3-gptoss-gemma" / "qwen.route.csv")
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
