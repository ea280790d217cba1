"""ExpertPool: the slots that all layers share, their bookkeeping, the way in from the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from seqmoe_cli.errors import PoolError, UnsupportedError
from seqmoe_cli.residency.policies import LOG2_1P, DecayedFrequency
from seqmoe_kernels import Fault, Resolved, fetch, resolve, verify_slots
from seqmoe_kernels.formats import (
    EMPTY,
    FAULT,
    GAP_NS,
    HITS,
    MISSES,
    NO_VICTIM,
    STALL_NS,
    STEP_NS,
    PoolState,
)
from seqmoe_kernels.proof import MAX_VERIFIED_EXPERTS
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

    def since(self, before: PoolCounters) -> PoolCounters:
        """What was counted after `before`."""
        pairs = zip(self, before, strict=True)
        return PoolCounters(*((after - then) % (1 << VALUE_BITS) for after, then in pairs))


class Stamps(NamedTuple):
    """Where a record has its I64 flat id, and how many experts of a layer the ids count."""

    offset: int
    num_experts: int

    def describe(self, fault: Fault) -> str:
        found = "something else" if fault.found is None else self._name(fault.found)
        return f"slot {fault.slot} should hold {self._name(fault.wanted)}, but holds {found}"

    def _name(self, flat_id: int) -> str:
        layer, expert = divmod(flat_id, self.num_experts)
        return f"layer {layer}, expert {expert}"


class ExpertPool:
    """`num_slots` slots of one record each on `device`, filled from `records`.

    `records` uint8 [num_experts, record_bytes] is the store in host memory, one row per flat
    expert id. `policy` says who is the victim of a miss: the expert whose last use is longest ago
    ("lru"), or with the smallest decayed count of uses ("decayed"); see `policies`. With `stamps`,
    every slot that is handed out is verified; else that costs nothing.
    """

    def __init__(
        self,
        num_slots: int,
        records: torch.Tensor,
        device: torch.device,
        stamps: Stamps | None = None,
        policy: str = "lru",
    ) -> None:
        num_experts, record_bytes = records.shape
        if stamps and num_experts > MAX_VERIFIED_EXPERTS:
            raise UnsupportedError(
                f"--verify: the model has {num_experts:,} experts in all layers, it can tell "
                f"{MAX_VERIFIED_EXPERTS:,}",
                "leave it out",
            )
        self.records = records
        self.num_slots = num_slots
        self.stamps = stamps
        self.slots = torch.empty((num_slots, record_bytes), dtype=torch.uint8, device=device)
        self.state = PoolState.cold(num_experts, num_slots, device)
        if policy == "decayed":
            sums = torch.from_numpy(LOG2_1P).int().to(device)
            self.state = self.state._replace(log_sums=sums)
        self.policy = policy
        self._set_rule()

    def require(self, flat_ids: torch.Tensor) -> torch.Tensor:
        """Slots int32 [n] that hold the distinct experts `flat_ids` int32 [n], n <= num_slots.

        One event: none of the wanted experts is a victim of the others. Fetches what is missing;
        everything is queued in stream order, nothing is waited for.
        """
        return self.fetch(flat_ids, resolve(flat_ids, self.state))

    def fetch(self, flat_ids: torch.Tensor, resolved: Resolved) -> torch.Tensor:
        """Fetch what is missing of an event whose slots are assigned; the slots int32 [n]."""
        misses = (resolved.miss_ids, resolved.miss_slots, resolved.num_misses)
        fetch(self.records, self.slots, *misses, self.state.marks)
        if self.stamps:
            slots, counters = resolved.slots, self.state.counters
            verify_slots(flat_ids, slots, self.slots, self.stamps.offset, counters)
        return resolved.slots

    def is_resident(self, flat_ids: torch.Tensor) -> torch.Tensor:
        """bool [n]: whether each expert has a slot now."""
        return self.state.slot_of[flat_ids.long()] >= 0

    def counters(self) -> PoolCounters:
        """Read the counters (waits for the device)."""
        return self.checked(self.state.counters.tolist())

    def checked(self, values: Sequence[int]) -> PoolCounters:
        """From the numbers of `PoolState.counters`. Raises `PoolError` once a slot held another
        expert than the one wanted; a miss without a victim is a broken program."""
        if values[NO_VICTIM]:
            raise AssertionError(f"{values[NO_VICTIM]} misses found no victim")
        if values[FAULT] and self.stamps:
            raise PoolError(
                self.stamps.describe(Fault.decode(values[FAULT])),
                "no token came of it; start again, and if it comes back, suspect the memory of "
                "this machine",
            )
        return PoolCounters(*(values[i] for i in (HITS, MISSES, STALL_NS, STEP_NS, GAP_NS)))

    def reset(self) -> None:
        """Make the pool cold: every slot EMPTY. Tags go on counting."""
        self.state.slot_of.fill_(-1)
        self.state.owner.fill_(-1)
        self.state.state.fill_(EMPTY)
        self.state.score.fill_(-1)
        self.state.usage.zero_()
        self._set_rule()

    def _set_rule(self) -> None:
        if self.policy == "decayed":
            policy = DecayedFrequency(len(self.records))
            self.state.rule.copy_(torch.tensor([policy.tick, policy.now]))
