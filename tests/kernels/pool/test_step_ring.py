"""The token ring: what a step publishes is what the host reads, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels import ENTRY_WORDS, PoolState, begin_step, publish, read_entry
from seqmoe_kernels.pool.step_ring import VALUE_BITS
from seqmoe_kernels.state import GAP_NS, NUM_COUNTERS, STALL_NS, STEP_BEGAN, STEP_ENDED, STEP_NS

SIZE = 4
CPU = torch.device("cpu")


def empty_ring(device: torch.device) -> torch.Tensor:
    pin = device.type == "cuda"
    return torch.full((SIZE, ENTRY_WORDS), -1, dtype=torch.int64, pin_memory=pin)


def int64(*values: int, device: torch.device = CPU) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize("first", [0, 65530, 10**9])  # the low bits start again at 65536
def test_entries_arrive_in_their_places(device: torch.device, first: int) -> None:
    for where, run in ((CPU, publish), (device, publish.launch)):
        ring, number = empty_ring(where), int64(first, device=where)
        pool = PoolState.cold(1, 1, where)
        for i in range(first, first + 9):
            assert read_entry(ring, i) is None
            values = [i, 2**40 + i, 0, *range(3, NUM_COUNTERS)]
            pool.counters.copy_(int64(*values))
            run(int64(i % 150_000, device=where), pool, ring, number)
            if where.type == "cuda":
                torch.cuda.synchronize()
            assert read_entry(ring, i) == [i % 150_000, *values]
            assert number.tolist() == [i + 1]
            if i - first >= SIZE:
                assert read_entry(ring, i - SIZE) is None  # overwritten


def test_an_entry_counts_only_when_all_words_are_there() -> None:
    ring, number = empty_ring(CPU), int64(7)
    publish(int64(42), PoolState.cold(1, 1, CPU), ring, number)
    whole = ring.clone()
    for word in range(ENTRY_WORDS):
        ring.copy_(whole)
        ring[7 % SIZE, word] = -1
        assert read_entry(ring, 7) is None


def test_large_sums_of_time_keep_their_low_bits(device: torch.device) -> None:
    for where, run in ((CPU, publish), (device, publish.launch)):
        pool, ring = PoolState.cold(1, 1, where), empty_ring(where)
        pool.counters[STALL_NS] = 2**60 + 5
        run(int64(0, device=where), pool, ring, int64(0, device=where))
        if where.type == "cuda":
            torch.cuda.synchronize()
        entry = read_entry(ring, 0)
        assert entry is not None and entry[1 + STALL_NS] == (2**60 + 5) % 2**VALUE_BITS


def test_times_of_steps_and_of_the_gaps_between_them(device: torch.device) -> None:
    """Sums of what the marks say; the first entry belongs to no step, the second has no gap."""
    for where, start, end in (
        (CPU, begin_step, publish),
        (device, begin_step.launch, publish.launch),
    ):
        pool, ring, number = PoolState.cold(1, 1, where), empty_ring(where), int64(0, device=where)
        steps = gaps = 0
        for i in range(3):
            ended = int(pool.marks[STEP_ENDED])
            pool.rule.copy_(int64(7, 100))
            if i > 0:
                start(pool)
                assert pool.rule.tolist() == [7, 107]
                gaps += int(pool.marks[STEP_BEGAN]) - ended
            began = int(pool.marks[STEP_BEGAN])
            end(int64(0, device=where), pool, ring, number)
            steps += int(pool.marks[STEP_ENDED]) - began if began else 0
            assert pool.counters[[STEP_NS, GAP_NS]].tolist() == [steps, gaps]
        if where.type == "cpu" and end is publish:
            assert steps > 0 and gaps > 0
