"""SlotTable: the bookkeeping of the pool, over numpy, for events that come by the million.

It decides as `seqmoe_kernels.resolve` does, slot for slot; a test holds the two against each other.
"""

from __future__ import annotations

import numpy as np

from seqmoe_cli.residency.policies import Ints
from tools.simulator.scores import Policy


class SlotTable:
    """`num_slots` slots for experts known by flat ids in [0, num_experts); empty at the start."""

    def __init__(self, num_slots: int, num_experts: int) -> None:
        self.slot_of = np.full(num_experts, -1, np.int64)  # by expert; -1: has none
        self.owner = np.full(num_slots, -1, np.int64)  # by slot; -1: empty

    def require(self, wanted: Ints, policy: Policy, barred: Ints) -> tuple[Ints, Ints]:
        """One event: distinct flat ids [n]. Their slots, and those of them that were loads, which
        took the slots of victims in the order of `wanted`. What is wanted is no victim, nor are the
        slots `barred`."""
        slots = self.slot_of[wanted]
        miss = slots < 0
        if not miss.any():
            return slots, wanted[:0]
        loads = wanted[miss]
        slots[miss] = policy.victims(self.owner, np.concatenate((barred, slots[~miss])), loads)
        self.vacate(slots[miss])
        self.owner[slots[miss]] = loads
        self.slot_of[loads] = slots[miss]
        return slots, loads

    def vacate(self, slots: Ints) -> None:
        """The owners of these slots leave the lookup table, and the slots are empty."""
        old = self.owner[slots]
        held = (old >= 0) & (self.slot_of[old] == slots)  # others were only on their way here
        self.slot_of[old[held]] = -1
        self.owner[slots] = -1
