"""SlotTable: the bookkeeping of the pool, over numpy, for events that come by the million.

It decides as `seqmoe_kernels.resolve` does, slot for slot; a test holds the two against each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_EMPTY, _WANTED = (
    np.iinfo(np.int64).min,
    np.iinfo(np.int64).max,
)  # scores below and above all others


class SlotTable:
    """`num_slots` slots for experts known by flat ids in [0, num_experts); empty at the start."""

    def __init__(self, num_slots: int, num_experts: int) -> None:
        self.slot_of = np.full(num_experts, -1, np.int64)  # by expert; -1: has none
        self.owner = np.full(num_slots, -1, np.int64)  # by slot; -1: empty
        self.score = np.full(num_slots, _EMPTY, np.int64)  # by slot; the smallest is the victim

    def require(
        self, wanted: NDArray[np.int64], score: int | NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], int]:
        """One event: distinct flat ids [n], n <= num_slots. Their slots, and how many were loads.

        A load, in the order of `wanted`, takes the slot of the smallest (score, slot) that holds
        nothing wanted. `score`, for all or for each, is what the wanted have afterwards.
        """
        slots = self.slot_of[wanted]
        num_loads = 0
        if slots.min() < 0:
            self.score[slots[slots >= 0]] = _WANTED
            for i in np.flatnonzero(slots < 0):
                slots[i] = self._load(wanted[i])
                num_loads += 1
        self.score[slots] = score
        return slots, num_loads

    def _load(self, expert: np.int64) -> np.intp:
        slot = self.score.argmin()
        if self.owner[slot] >= 0:
            self.slot_of[self.owner[slot]] = -1
        self.owner[slot] = expert
        self.slot_of[expert] = slot
        self.score[slot] = _WANTED
        return slot
