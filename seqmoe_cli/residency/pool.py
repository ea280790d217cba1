"""ExpertPool: the slots that all layers share, their bookkeeping, the way in from the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from seqmoe_cli.errors import PoolError, UnsupportedError
from seqmoe_cli.residency.policies import (
    CLOCK_START,
    EXP2,
    LOG2_1P,
    discounted,
    ticks,
    uses_per_count,
)
from seqmoe_kernels import (
    AllCopied,
    Fault,
    Flights,
    Resolved,
    Signals,
    fetch,
    resolve,
    verify_slots,
)
from seqmoe_kernels.eviction.expected_use import ExpectedUse
from seqmoe_kernels.pool.fetch import Begun
from seqmoe_kernels.pool.verify import MAX_VERIFIED_EXPERTS
from seqmoe_kernels.state import EMPTY, FAULT, FETCHING, NO_VICTIM, PoolState

MAX_WAVE = 256  # experts that one event takes


def make_expected_use(num_experts: int, num_slots: int, device: torch.device) -> ExpectedUse:
    """For the policy `forecast`: nothing is known yet."""
    weights, tail = discounted()
    numbers = torch.tensor([*weights.tolist(), tail, uses_per_count()])
    return ExpectedUse.unknown(num_experts, num_slots, torch.from_numpy(EXP2), numbers, device)


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
    expert id. The `policy` chooses the victim of a miss: the expert with the oldest last
    use ("lru"), or the one with the smallest decayed count of uses ("decayed"; "forecast" too,
    while there is no forecast); see `policies`. With `stamps` every slot that is handed
    out is verified.
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
        self.flights: Flights | None = None
        self._num_barred = 0  # slots that prefetches may keep from victims
        self.slots = torch.empty((num_slots, record_bytes), dtype=torch.uint8, device=device)
        self.state = PoolState.cold(num_experts, num_slots, device)
        if policy != "lru":
            sums = torch.from_numpy(LOG2_1P).int().to(device)
            self.state = self.state._replace(log_sums=sums)
        self.policy = policy
        self._set_rule()

    def land(self, flights: Flights, most_kept: int) -> None:
        """From now on, every event takes note of what was prefetched first; `most_kept` slots at
        the most are kept for that."""
        self.flights, self._num_barred = flights, most_kept

    @property
    def largest_event(self) -> int:
        """As many experts as one event may want."""
        return self.num_slots - self._num_barred

    def require(self, flat_ids: torch.Tensor) -> torch.Tensor:
        """Slots int32 [n] that hold the distinct experts `flat_ids` int32 [n], at most as many as
        `largest_event`.

        One event: none of the wanted experts is a victim of the others. Fetches what is missing;
        everything is queued in stream order, nothing is waited for.
        """
        return self.fetch(flat_ids, resolve(flat_ids, self.state, self.flights))

    def fetch(
        self,
        flat_ids: torch.Tensor,
        resolved: Resolved,
        begun: Begun | None = None,
    ) -> torch.Tensor:
        """Fetch what is missing of an event whose slots are assigned; the slots int32 [n]. `begun`
        is set as soon as all kernels before the fetch have ended."""
        state, flights, signals = self.state, self.flights, None
        if flights is not None:
            signals = Signals(AllCopied(flights.control, state.clock, flights.arrived), begun)
        fetch(self.records, self.slots, resolved, state.marks, signals)
        if self.stamps:
            slots, counters = resolved.slots, self.state.counters
            verify_slots(flat_ids, slots, self.slots, self.stamps.offset, counters)
        return resolved.slots

    def fill(self, ranking: torch.Tensor) -> None:
        """Fetch the first experts of `ranking` (int32 [n], distinct), as many as there are slots;
        the first of all is the last to leave. For a cold pool."""
        chosen = ranking[: self.num_slots].flip(0)
        for wave in torch.split(chosen, min(self.largest_event, MAX_WAVE)):
            self.require(wave)
        self.state.marks.zero_()  # no answer has waited for it

    def demote(self, flat_ids: torch.Tensor) -> None:
        """Let those of these experts that are resident be the next to leave (waits for the
        device)."""
        slots = self.state.slot_of[flat_ids.long()].long()
        self.state.score[slots[slots >= 0]] = 0

    def is_resident(self, flat_ids: torch.Tensor) -> torch.Tensor:
        """bool [n]: whether each expert has a slot now."""
        return self.state.slot_of[flat_ids.long()] >= 0

    def counters(self) -> Sequence[int]:
        """`PoolState.counters` (waits for the device), `checked`."""
        return self.checked(self.state.counters.tolist())

    def checked(self, values: Sequence[int]) -> Sequence[int]:
        """The same numbers. Raises `PoolError` once a slot held another expert than the one wanted;
        a miss without a victim is a broken program."""
        if values[NO_VICTIM]:
            raise AssertionError(f"{values[NO_VICTIM]} misses found no victim")
        if values[FAULT] and self.stamps:
            raise PoolError(
                self.stamps.describe(Fault.decode(values[FAULT])),
                "no token came of it; start again, and if it comes back, suspect the memory of "
                "this machine",
            )
        return values

    def disown(self) -> None:
        """Copies that are under way belong to no expert from now on: a slot is empty once its
        copy has landed. For events that do not take note of copies, and would fetch
        the same expert."""
        self.state.owner.masked_fill_(self.state.state == FETCHING, -1)

    def reset(self) -> None:
        """Make the pool cold: every slot EMPTY, but for those that a copy is on its way to. Tags go
        on counting."""
        state = self.state
        state.slot_of.fill_(-1)
        state.owner.fill_(-1)  # so what lands belongs to no expert
        state.state.masked_fill_(state.state != FETCHING, EMPTY)
        state.score.fill_(-1)
        state.usage.zero_()
        self._set_rule()

    def _set_rule(self) -> None:
        if self.policy != "lru":
            self.state.rule.copy_(torch.tensor([ticks(), CLOCK_START]))
