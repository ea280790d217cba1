"""Which experts may leave the pool, and which first: the scores by which victims are chosen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.eviction.expected_use import ExpectedUse
from seqmoe_kernels.eviction.units import NEVER
from seqmoe_kernels.state import EMPTY, FETCHING, PoolState

_NEVER, _EMPTY, _FETCHING = map(tl.constexpr, (NEVER, EMPTY, FETCHING))


def victim_scores_reference(
    pool: PoolState, expected_use: ExpectedUse | None, first_to_come: int
) -> torch.Tensor:
    score = pool.score
    if expected_use is not None:
        passed = pool.owner < first_to_come
        score = torch.where(passed, expected_use.slot_passed, expected_use.slot_coming)
    score = score.masked_fill(pool.state == EMPTY, -1)
    return score.masked_fill(pool.state == FETCHING, NEVER)


@triton.jit
def victim_scores(pool, expected_use, first_to_come, num_slots, slot):
    """The score by which each slot may become a victim; `_NEVER` if it must not. With
    `expected_use` that is what its expert is worth, the layers before the id `first_to_come`
    being passed."""
    inside = slot < num_slots
    score = tl.load(pool.score + slot, mask=inside, other=_NEVER)
    state = tl.load(pool.state + slot, mask=inside, other=_FETCHING)
    if expected_use is not None:
        owner = tl.load(pool.owner + slot, mask=inside, other=0)
        passed = tl.load(expected_use.slot_passed + slot, mask=inside, other=0)
        coming = tl.load(expected_use.slot_coming + slot, mask=inside, other=0)
        worth = tl.where(owner < first_to_come, passed, coming)
        score = tl.where(score == _NEVER, _NEVER, worth)
    return tl.where(state == _EMPTY, -1, tl.where(state == _FETCHING, _NEVER, score))


@triton.jit
def poorest(victims, places, used, found, flight):
    """The scores of those left, and the slot of the lowest one, -1 if there is none: not one that
    this layer uses, that the next ones are believed to, or that is promised."""
    victim, is_barred = -1, 1
    while is_barred > 0:
        least, victim = tl.min(victims, 0, return_indices=True)  # of equal ones the first
        is_barred = tl.max((used == victim).to(tl.int32), 0)
        is_barred += tl.max((found == victim).to(tl.int32), 0)
        is_barred += tl.max((flight == victim).to(tl.int32), 0)
        victims = tl.where(places == victim, _NEVER, victims)
        if least == _NEVER:
            victim, is_barred = -1, 0
    return victims, victim
