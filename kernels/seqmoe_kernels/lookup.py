"""Resolving wanted experts to slots: the lookup table, and a victim for every miss."""

from __future__ import annotations

from typing import NamedTuple

import torch

from seqmoe_kernels.formats import EMPTY, FETCHING, HITS, MISSES, NO_VICTIM, READY, PoolState

NEVER = torch.iinfo(torch.int64).max  # the score of a slot that must not become a victim


class Resolved(NamedTuple):
    """Where n wanted experts are, and which of them must be fetched (rows past num_misses: -1)."""

    slots: torch.Tensor  # int32 [n], the slot of each wanted expert, -1 if there was no victim
    miss_ids: torch.Tensor  # int32 [n], flat expert ids in the order of `wanted`
    miss_slots: torch.Tensor  # int32 [n], the slot that each one must be copied to
    num_misses: torch.Tensor  # int32 [1]


def resolve_reference(wanted: torch.Tensor, pool: PoolState) -> Resolved:
    pool.clock.add_(1)
    slots = pool.slot_of[wanted.long()]
    hit = slots >= 0
    pool.score[slots[hit].long()] = pool.clock
    candidates = pool.score.masked_fill(pool.state == EMPTY, -1)
    candidates[pool.state == FETCHING] = NEVER
    candidates[slots[hit].long()] = NEVER
    missed = (~hit).nonzero().flatten().tolist()
    for i in missed:
        slots[i] = _assign(int(wanted[i]), candidates, pool)
    pool.counters[HITS] += int(hit.sum())
    pool.counters[MISSES] += len(missed)
    miss_ids, miss_slots = torch.full_like(slots, -1), torch.full_like(slots, -1)
    miss_ids[: len(missed)] = wanted[~hit]
    miss_slots[: len(missed)] = slots[~hit]
    num_misses = torch.tensor([len(missed)], dtype=torch.int32, device=wanted.device)
    return Resolved(slots, miss_ids, miss_slots, num_misses)


def _assign(expert: int, candidates: torch.Tensor, pool: PoolState) -> int:
    """Give `expert` the lowest slot among those of the lowest score; -1 if there is none."""
    least = candidates.min()
    if least == NEVER:
        pool.counters[NO_VICTIM] += 1
        return -1
    victim = int((candidates == least).nonzero()[0])
    if (owner := int(pool.owner[victim])) >= 0:
        pool.slot_of[owner] = -1
    pool.slot_of[expert] = victim
    pool.owner[victim] = expert
    pool.state[victim] = READY
    pool.assigned_tag[victim] += 1
    pool.landed_tag[victim] = pool.assigned_tag[victim]  # the fetch follows in stream order
    pool.score[victim] = pool.clock
    candidates[victim] = NEVER
    return victim


def resolve(wanted: torch.Tensor, pool: PoolState) -> Resolved:
    """Look up the slots of `wanted` (int32 [n], distinct flat expert ids) and assign the misses.

    One event: `pool.clock` goes up by one and becomes the score of every wanted slot. A miss, in
    the order of `wanted`, takes the slot of the smallest (score, slot), EMPTY slots first, that is
    neither FETCHING nor holds a wanted expert; its old owner leaves the lookup table, its tags go
    up. Without such a slot the miss gets slot -1 and is counted in NO_VICTIM. The weights are not
    moved here: `fetch` the result before reading the slots. Updates `pool` in place.
    """
    return resolve_reference(wanted, pool)
