"""Prefetches on the device: landing, dropping, waiting, asking; kernels against references."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from seqmoe_kernels import (
    Flights,
    PoolState,
)
from seqmoe_kernels.pool.resolve import resolve, resolve_reference
from seqmoe_kernels.state import (
    DROPPED,
    EMPTY,
    FETCHING,
    HITS,
    LANDED,
    LATE,
    MISSES,
    NO_VICTIM,
    PATIENCE_NS,
    PREDICTED,
    PREFETCH_HITS,
    PREFETCHES,
    READY,
)
from tests.kernels.pool_states import (
    DISTANCES,
    EXPERTS,
    LAYERS,
    NAMES,
    flights_on,
    make,
    pool_on,
    wanted,
)
from tests.kernels.step_case import Case


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "num_slots,use_recorded,hinted",
    [(9, False, False), (25, False, False), (25, True, False), (25, False, True)],
)
def test_random_steps(
    device: torch.device, num_slots: int, use_recorded: bool, hinted: bool, seed: int
) -> None:
    """Exact equality of everything, and every slot handed out holds what it should."""
    case = Case(num_slots, device, seed, hinted)
    for _ in range(3):
        if hinted:
            case.pick_candidates()
        recorded = None
        if use_recorded:
            shape = (1, LAYERS, DISTANCES, NAMES)
            scores = torch.rand(1, LAYERS, DISTANCES, EXPERTS, generator=case.gen)
            recorded = scores.argsort(-1)[..., :NAMES].int().contiguous()
            recorded[torch.rand(shape, generator=case.gen) < 0.2] = -1
        for layer in range(LAYERS):
            case.layer(layer, recorded)
            case.host()
            case.host()
    counters = case.pool.counters
    assert counters[PREFETCHES] > 3 and counters[NO_VICTIM] == 0
    assert counters[PREFETCH_HITS] + counters[DROPPED] > 0
    assert case.state.accuracy[:, PREDICTED].min() > 0


def ask_for(expert: int, slot: int, event: int, pool: PoolState, state: Flights) -> None:
    """What a request leaves behind."""
    if (old := int(pool.owner[slot])) >= 0:
        pool.slot_of[old] = -1
    pool.owner[slot], pool.state[slot] = expert, FETCHING
    pool.assigned_tag[slot] += 1
    free = state.slot.tolist().index(-1)
    state.slot[free], state.event[free] = slot, event


RUNS = pytest.mark.parametrize("run", [resolve_reference, resolve.launch])


@RUNS
def test_only_the_tag_assigned_last_lands(run: object, device: torch.device) -> None:
    """An older copy of the same slot, or none: the expert is a miss, the copy is dropped."""
    pool, state = make(9)
    ask_for(7, 2, 5, pool, state)
    pool.assigned_tag[2] = 4
    pool.landed_tag[2] = 3
    pool, state = pool_on(pool, device), flights_on(state, device)
    assert callable(run)
    resolved = run(wanted(7).to(device), pool, state)
    assert resolved.num_misses.tolist() == [1] and resolved.slots.tolist() == [0]
    assert pool.counters[DROPPED] == 1 and pool.owner[2] == -1 and pool.state[2] == FETCHING
    pool.landed_tag[2] = 4  # it lands after all
    run(wanted(8).to(device), pool, state)
    assert pool.state[2] == EMPTY and pool.slot_of[7] == 0 and state.slot.max() == -1


@RUNS
def test_a_copy_in_time_is_a_hit_and_kept_for_its_event(run: object, device: torch.device) -> None:
    pool, state = make(3)
    ask_for(7, 1, 3, pool, state)
    pool.landed_tag[1] = 1
    pool, state = pool_on(pool, device), flights_on(state, device)
    assert callable(run)
    run(wanted(1, 2).to(device), pool, state)
    assert pool.state[1] == READY and pool.score[1] == 0
    run(wanted(3, 4).to(device), pool, state)
    assert pool.slot_of[7] == 1 and pool.counters[PREFETCH_HITS] == 0  # the oldest, but promised
    hit = run(wanted(7).to(device), pool, state)
    assert hit.num_misses.tolist() == [0] and hit.slots.tolist() == [1]
    assert pool.counters[[HITS, PREFETCH_HITS]].tolist() == [1, 1]
    assert state.slot.max() == -1 and state.absent[0] == 1


@RUNS
def test_a_wrong_prefetch_is_the_next_victim(run: object, device: torch.device) -> None:
    pool, state = make(3)
    ask_for(7, 1, 1, pool, state)
    pool.landed_tag[1] = 1
    pool, state = pool_on(pool, device), flights_on(state, device)
    assert callable(run)
    run(wanted(1, 2).to(device), pool, state)
    assert run(wanted(3).to(device), pool, state).slots.tolist() == [1]


@RUNS
def test_a_refused_copy_leaves_an_empty_slot(run: object, device: torch.device) -> None:
    pool, state = make(9)
    ask_for(7, 1, 5, pool, state)
    pool.landed_tag[1] = -1
    pool, state = pool_on(pool, device), flights_on(state, device)
    assert callable(run)
    assert run(wanted(7).to(device), pool, state).num_misses.tolist() == [1]
    assert pool.counters[[LANDED, DROPPED, MISSES]].tolist() == [0, 0, 1] and pool.state[1] == EMPTY


@pytest.mark.parametrize("patience_s", [0.0, 20.0])
def test_a_copy_about_to_land_is_waited_for(patience_s: float) -> None:
    pool, state = make(9)
    state.rules[PATIENCE_NS] = int(patience_s * 1e9)
    ask_for(7, 1, 1, pool, state)
    state.due_ns[0] = time.perf_counter_ns()

    def land() -> None:
        time.sleep(0.05)
        pool.landed_tag[1] = 1

    thread = threading.Thread(target=land)
    thread.start()
    resolved = resolve(wanted(7), pool, state)
    thread.join()
    waited = patience_s > 0
    assert resolved.num_misses.tolist() == [not waited]
    assert pool.counters[[LATE, DROPPED, MISSES, HITS]].tolist() == [waited, not waited, 1, 0]


def test_waiting_ends(device: torch.device) -> None:
    pool, state = make(9)
    state.rules[PATIENCE_NS] = 1000
    ask_for(7, 1, 1, pool, state)
    state.due_ns[0] = -(2**62)
    pool, state = pool_on(pool, device), flights_on(state, device)
    resolved = resolve.launch(wanted(7).to(device), pool, state)
    assert resolved.num_misses.tolist() == [1] and pool.counters[DROPPED] == 1
