"""The token ring: what a step publishes is what the host reads, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels import publish, read_entry
from seqmoe_kernels.publish import publish_triton

SIZE = 4


def empty_ring(device: torch.device) -> torch.Tensor:
    return torch.full((SIZE, 4), -1, dtype=torch.int64, pin_memory=device.type == "cuda")


def int64(*values: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize("first", [0, 65530, 10**9])  # the low bits start again at 65536
def test_entries_arrive_in_their_places(device: torch.device, first: int) -> None:
    cpu = torch.device("cpu")
    for where, run in ((cpu, publish), (device, publish_triton)):
        ring, number = empty_ring(where), int64(first, device=where)
        for i in range(first, first + 9):
            assert read_entry(ring, i) is None
            counters = int64(i, 2**40 + i, 0, device=where)
            run(int64(i % 150_000, device=where), counters, ring, number)
            if where.type == "cuda":
                torch.cuda.synchronize()
            assert read_entry(ring, i) == [i % 150_000, i, 2**40 + i, 0]
            assert number.tolist() == [i + 1]
            if i - first >= SIZE:
                assert read_entry(ring, i - SIZE) is None  # overwritten


def test_an_entry_counts_only_when_all_words_are_there() -> None:
    ring, number = empty_ring(torch.device("cpu")), int64(7)
    publish(int64(42), int64(1, 2, 3), ring, number)
    whole = ring.clone()
    for word in range(4):
        ring.copy_(whole)
        ring[7 % SIZE, word] = -1
        assert read_entry(ring, 7) is None
