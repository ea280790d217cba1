"""ExpertPool: the slots that all layers share, their bookkeeping, the way in from the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from seqmoe_kernels import fetch, resolve
from seqmoe_kernels.formats import (
    EMPTY,
    GAP_NS,
    HITS,
    MISSES,
    NO_VICTIM,
    STALL_NS,
    STEP_NS,
    PoolState,
)
from seqmoe_kernels.publish import VALUE_BITS


class PoolCounters(NamedTuple):
    """Since the pool was made: lookups that found a slot, those that had to fetch, and by the
    device's clock the nanoseconds of waiting for misses, of steps, and between steps.

    Differences are those of events that lie less than 39 hours apart.
    """

    hits: int
    misses: int
    stall_ns: int
    step_ns: int
    gap_ns: int

    @classmethod
    def checked(cls, values: Sequence[int]) -> PoolCounters:
        """From the numbers of `PoolState.counters`; a miss without a victim is a broken program."""
        if values[NO_VICTIM]:
            raise AssertionError(f"{values[NO_VICTIM]} misses found no victim")
        return cls(*(values[i] for i in (HITS, MISSES, STALL_NS, STEP_NS, GAP_NS)))

    def since(self, before: PoolCounters) -> PoolCounters:
        """What was counted after `before`."""
        pairs = zip(self, before, strict=True)
        return PoolCounters(*((after - then) % (1 << VALUE_BITS) for after, then in pairs))


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
        self.state = PoolState.cold(num_experts, num_slots, device)

    def require(self, flat_ids: torch.Tensor) -> torch.Tensor:
        """Slots int32 [n] that hold the distinct experts `flat_ids` int32 [n], n <= num_slots.

        One event: none of the wanted experts is a victim of the others. Fetches what is missing;
        everything is queued in stream order, nothing is waited for.
        """
        resolved = resolve(flat_ids, self.state)
        misses = (resolved.miss_ids, resolved.miss_slots, resolved.num_misses)
        fetch(self.records, self.slots, *misses, self.state.marks)
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
