"""The lookup table, the tags and the choice of victims, event by event."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from seqmoe_kernels import PoolState
from seqmoe_kernels.pool.fetch import AllCopied, Begun, Signals, fetch, fetch_reference
from seqmoe_kernels.pool.resolve import Resolved, resolve, resolve_reference
from seqmoe_kernels.state import (
    EMPTY,
    FETCHING,
    HITS,
    MISSES,
    NO_VICTIM,
    NUM_MARKS,
    READY,
    STALL_BEGAN,
    STALL_ENDED,
    STALL_NS,
)


def empty_pool(num_experts: int, num_slots: int) -> PoolState:
    return PoolState.cold(num_experts, num_slots, torch.device("cpu"))


def on(pool: PoolState, device: torch.device) -> PoolState:
    return PoolState(*(tensor.to(device, copy=True) for tensor in pool))


def wanted(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def assert_same(got: Resolved | PoolState, expected: Resolved | PoolState) -> None:
    for name, tensor in expected._asdict().items():
        numbers = slice(3) if name == "counters" else slice(None)  # the others are times
        if name != "marks":
            assert torch.equal(getattr(got, name).cpu()[numbers], tensor[numbers]), name


def start_prefetch(pool: PoolState, expert: int, slot: int) -> None:
    """What assigning a slot to a prefetch leaves behind: FETCHING, and in no lookup table."""
    if (old := int(pool.owner[slot])) >= 0:
        pool.slot_of[old] = -1
    pool.owner[slot], pool.state[slot] = expert, FETCHING
    pool.assigned_tag[slot] += 1


def check_invariants(pool: PoolState) -> None:
    for slot in range(len(pool.owner)):
        owner, state = int(pool.owner[slot]), int(pool.state[slot])
        if state == READY:
            assert int(pool.slot_of[owner]) == slot
            assert pool.assigned_tag[slot] == pool.landed_tag[slot]
        else:
            assert (pool.slot_of != slot).all()


@pytest.mark.parametrize("tick", [0, 4096])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_experts,num_slots,n", [(24, 5, 3), (64, 37, 8), (12, 4, 4)])
def test_random_events(
    device: torch.device, num_experts: int, num_slots: int, n: int, seed: int, tick: int
) -> None:
    """Exact equality of every tensor, with prefetches, emptied slots and lost races between; by
    both rules."""
    gen = torch.Generator().manual_seed(seed)
    expected = empty_pool(num_experts, num_slots)
    if tick:
        sums = torch.arange(20, -1, -1, dtype=torch.int32) * 3000
        expected = expected._replace(log_sums=sums)
        expected.rule.copy_(torch.tensor([tick, 2**26]))
    pool = on(expected, device)
    for _ in range(25):
        count = int(torch.randint(1, n + 1, (1,), generator=gen))
        ids = torch.randperm(num_experts, generator=gen)[:count].int()
        reference = resolve_reference(ids, expected)
        assert_same(resolve.launch(ids.to(device), pool), reference)
        assert_same(pool, expected)
        check_invariants(expected)
        for state in (expected, pool):
            state.rule[1] += tick
        if torch.rand(1, generator=gen) < 0.4:
            _disturb(expected, gen)
            pool = on(expected, device)
    assert expected.counters[HITS] > 0 and expected.counters[MISSES] > 0


def _disturb(pool: PoolState, gen: torch.Generator) -> None:
    slot = int(torch.randint(0, len(pool.owner), (1,), generator=gen))
    kind = int(torch.randint(0, 3, (1,), generator=gen))
    absent = [e for e in range(len(pool.slot_of)) if e not in pool.owner.tolist()]
    if kind == 0:
        start_prefetch(pool, absent[0], slot)
    elif kind == 1:  # a copy that was dropped
        if (old := int(pool.owner[slot])) >= 0:
            pool.slot_of[old] = -1
        pool.owner[slot], pool.state[slot] = -1, EMPTY
    else:  # a policy's score, far from the clock
        pool.score[slot] = int(torch.randint(0, 2**40, (1,), generator=gen))


def test_lru_order_and_counters() -> None:
    pool = empty_pool(10, 3)
    assert resolve_reference(wanted(7, 2), pool).slots.tolist() == [0, 1]
    assert resolve_reference(wanted(7), pool).num_misses.tolist() == [0]
    third = resolve_reference(wanted(5, 7), pool)  # the EMPTY slot before any READY one
    assert third.slots.tolist() == [2, 0] and third.miss_slots.tolist() == [2, -1]
    fourth = resolve_reference(wanted(1), pool)  # 2 was used longest ago
    assert fourth.miss_ids.tolist() == [1] and fourth.slots.tolist() == [1]
    assert int(pool.slot_of[2]) == -1 and pool.assigned_tag.tolist() == [1, 2, 1]
    assert pool.counters[:3].tolist() == [2, 4, 0] and pool.clock.tolist() == [4]


@pytest.mark.parametrize("run", [resolve_reference, resolve.launch])
def test_wanted_experts_are_no_victims(run: object, device: torch.device) -> None:
    pool = empty_pool(8, 3)
    for expert in (0, 1, 2):
        resolve_reference(wanted(expert), pool)
    pool = on(pool, device)
    assert callable(run)
    resolved = run(wanted(5, 0).to(device), pool)  # 0 is the oldest, but wanted beside 5
    assert resolved.slots.tolist() == [1, 0]


@pytest.mark.parametrize("run", [resolve_reference, resolve.launch])
def test_no_victim_is_counted_and_never_served(run: object, device: torch.device) -> None:
    pool = empty_pool(8, 2)
    start_prefetch(pool, 6, 0)
    pool = on(pool, device)
    assert callable(run)
    resolved = run(wanted(6, 3).to(device), pool)  # 6 is on its way, which is no hit
    assert resolved.slots.tolist() == [1, -1]
    assert resolved.miss_ids.tolist() == [6, 3] and resolved.miss_slots.tolist() == [1, -1]
    assert resolved.num_misses.tolist() == [2]
    assert pool.counters[NO_VICTIM] == 1 and pool.state[0] == FETCHING
    assert pool.slot_of[3] == -1


def test_resolve_over_many_slots(device: torch.device) -> None:
    """More slots than threads, not a power of two; the victim is the last slot."""
    expected = empty_pool(2000, 1500)
    expected.state.fill_(READY)
    expected.owner.copy_(torch.arange(1500))
    expected.slot_of[:1500] = expected.owner
    expected.score.copy_(torch.arange(1500, 0, -1))
    expected.clock.fill_(1501)
    pool = on(expected, device)
    ids = torch.cat((torch.arange(1490, 1500), torch.arange(1600, 1700))).int()
    assert_same(resolve.launch(ids.to(device), pool), resolve_reference(ids, expected))
    assert_same(pool, expected)
    assert int(expected.slot_of[1600]) == 1489


def test_resolve_on_the_cpu_is_the_reference() -> None:
    pool, expected = empty_pool(6, 2), empty_pool(6, 2)
    assert_same(resolve(wanted(4, 1), pool), resolve_reference(wanted(4, 1), expected))
    assert_same(pool, expected)


@pytest.mark.parametrize("record_bytes", [48, 4096, 66000 // 16 * 16])
def test_fetch(device: torch.device, gen: torch.Generator, record_bytes: int) -> None:
    """Exactly the missed records arrive, in exactly their slots; -1 and the rest stay untouched."""
    records = torch.randint(0, 256, (9, record_bytes), generator=gen, dtype=torch.uint8)
    before = torch.randint(0, 256, (6, record_bytes), generator=gen, dtype=torch.uint8)
    ids, to_slots, count = wanted(8, 0, 3, 5), wanted(5, -1, 1, 2), wanted(3)
    expected = before.clone()
    expected[5], expected[1] = records[8], records[3]
    marks = torch.zeros(NUM_MARKS, dtype=torch.int64)
    misses = Resolved(to_slots, ids, to_slots, count)
    for run in (fetch_reference, fetch):
        slots = before.clone()
        run(records, slots, misses, marks)
        assert torch.equal(slots, expected)
    slots = before.to(device, copy=True)
    source = records.pin_memory() if device.type == "cuda" else records
    fetch.launch(source, slots, Resolved(*(t.to(device) for t in misses)), marks.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize()  # before `source` is freed
    assert torch.equal(slots.cpu(), expected)


@pytest.mark.parametrize("run", [resolve_reference, resolve.launch])
def test_stall_is_the_time_from_the_misses_to_the_end_of_their_copies(
    run: object, device: torch.device
) -> None:
    pool = on(empty_pool(8, 3), device)
    assert callable(run)
    run(wanted(5, 0).to(device), pool)
    assert pool.marks[STALL_BEGAN] > 0 and pool.counters[STALL_NS] == 0
    pool.marks[STALL_ENDED] = pool.marks[STALL_BEGAN] + 1234
    run(wanted(5).to(device), pool)  # nothing is missing
    run(wanted(0).to(device), pool)
    assert pool.counters[STALL_NS] == 1234 and pool.marks[STALL_ENDED] == 0


def test_fetch_marks_its_end(device: torch.device) -> None:
    records = torch.zeros((2, 64), dtype=torch.uint8)
    source = records.pin_memory() if device.type == "cuda" else records
    slots, one = records.to(device), wanted(0).to(device)
    for missing in (0, 1):
        marks = torch.zeros(NUM_MARKS, dtype=torch.int64, device=device)
        fetch.launch(source, slots, Resolved(one, one, one, wanted(missing).to(device)), marks)
        assert (marks[STALL_ENDED] > 0).tolist() == bool(missing)


@pytest.mark.parametrize("run", [fetch_reference, fetch.launch])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_fetch_signals_its_beginning_and_the_end_of_its_copies(
    run: Callable[..., None], missing: int, device: torch.device
) -> None:
    """The end only if there was something to copy."""

    def word(value: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype, device=device)

    records = torch.arange(3, dtype=torch.uint8)[:, None].repeat(1, 64)
    source = records.pin_memory() if device.type == "cuda" else records
    slots, ids = torch.zeros_like(records, device=device), wanted(2, 1).to(device)
    marks = torch.zeros(NUM_MARKS, dtype=torch.int64, device=device)
    all_copied = AllCopied(word(-1), word(21), word(0, torch.int32))
    signals = Signals(all_copied, Begun(word(-1, torch.int32), 13))
    run(source, slots, Resolved(ids, ids, ids, wanted(missing).to(device)), marks, signals)
    assert int(all_copied.word) == (42 if missing else -1) and int(all_copied.arrived) == 0
    assert signals.begun is not None and int(signals.begun.word) == 13
    assert slots[:, 0].tolist() == [0, missing // 2, 2 * (missing > 0)]
