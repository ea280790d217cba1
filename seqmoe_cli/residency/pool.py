"""ExpertPool: the slots that all layers share, their bookkeeping, the way in from the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from seqmoe_kernels import fetch, resolve
from seqmoe_kernels.formats import EMPTY, HITS, MISSES, NO_VICTIM, PoolState


class PoolCounters(NamedTuple):
    """Events since the pool was made: lookups that found a slot, and those that had to fetch."""

    hits: int
    misses: int

    @classmethod
    def checked(cls, values: Sequence[int]) -> PoolCounters:
        """From the numbers of `PoolState.counters`; a miss without a victim is a broken program."""
        if values[NO_VICTIM]:
            raise AssertionError(f"{values[NO_VICTIM]} misses found no victim")
        return cls(values[HITS], values[MISSES])


class ExpertPool:
    """`num_slots` slots of one record each on `device`, filled from `records`.

    `records` uint8 [num_experts, record_bytes] is the store in host memory, one row per flat
    expert id. The victim of a miss is the expert whose last use is longest ago (LRU).
    """

    def __init__(self, num_slots: int, records: torch.Tensor, device: torch.device) -> None:
        num_experts, record_bytes = records.shape
        self.records = records
        self.num_slots = num_slots
        self.slots = torch.empty((num_slots, record_bytes), dtype=torch.uint8, device=device)
        self.state = PoolState(
            slot_of=torch.full((num_experts,), -1, dtype=torch.int32, device=device),
            owner=torch.full((num_slots,), -1, dtype=torch.int32, device=device),
            state=torch.full((num_slots,), EMPTY, dtype=torch.int32, device=device),
            assigned_tag=torch.zeros(num_slots, dtype=torch.int64, device=device),
            landed_tag=torch.zeros(num_slots, dtype=torch.int64, device=device),
            score=torch.full((num_slots,), -1, dtype=torch.int64, device=device),
            clock=torch.zeros(1, dtype=torch.int64, device=device),
            counters=torch.zeros(3, dtype=torch.int64, device=device),
        )

    def require(self, flat_ids: torch.Tensor) -> torch.Tensor:
        """Slots int32 [n] that hold the distinct experts `flat_ids` int32 [n], n <= num_slots.

        One event: none of the wanted experts is a victim of the others. Fetches what is missing;
        everything is queued in stream order, nothing is waited for.
        """
        resolved = resolve(flat_ids, self.state)
        fetch(self.records, self.slots, resolved.miss_ids, resolved.miss_slots, resolved.num_misses)
        return resolved.slots

    def is_resident(self, flat_ids: torch.Tensor) -> torch.Tensor:
        """bool [n]: whether each expert has a slot now."""
        return self.state.slot_of[flat_ids.long()] >= 0

    def counters(self) -> PoolCounters:
        """Read the counters (waits for the device)."""
        return PoolCounters.checked(self.state.counters.tolist())

    def reset(self) -> None:
        """Make the pool cold: every slot EMPTY. Tags go on counting."""
        self.state.slot_of.fill_(-1)
        self.state.owner.fill_(-1)
        self.state.state.fill_(EMPTY)
        self.state.score.fill_(-1)
