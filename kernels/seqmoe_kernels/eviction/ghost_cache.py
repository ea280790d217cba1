"""The ghost of the pool: the experts that would be in it if decayed counts chose all victims. The
misses by a forecast are compared with those that the ghost would have had.

An expert is in the ghost from a use on until its score falls below the edge. Once a step the edge
rises until no more are left than the pool has slots, which is where the victims of that step would
have brought it; within the step it is taken to rise evenly from the first layer to the last. It is
true to 0.7 % of the misses, and lookups do no work for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import Sizes, check_all, zeros
from seqmoe_kernels.state import (
    MISSED_BY_COUNTS,
    MISSED_BY_FORECAST,
    MISSES,
    PREFETCH_HITS,
    RULE_NOW,
    RULE_TICK,
    PoolState,
)

BLOCK = 128  # experts of a program
# Edges that are tried: from the present one on, eight in a step's time; and around the present
# time, by the squares of -8 to 23 steps back, so that it finds its place from anywhere soon.
NEAR, FAR, AFTER = 32, 32, 8
NUM_EDGES = NEAR + FAR

_NEAR, _AFTER, _NUM_EDGES = map(tl.constexpr, (NEAR, AFTER, NUM_EDGES))
_RULE_TICK, _RULE_NOW = tl.constexpr(RULE_TICK), tl.constexpr(RULE_NOW)
_MISSES, _PREFETCH_HITS = tl.constexpr(MISSES), tl.constexpr(PREFETCH_HITS)
_BY_COUNTS = tl.constexpr(MISSED_BY_COUNTS)
_BY_FORECAST = tl.constexpr(MISSED_BY_FORECAST)


class GhostCache(NamedTuple):
    """N experts by flat id, P parts of a sum."""

    member: torch.Tensor  # int32 [N], 1: in the ghost as the last step began
    score: torch.Tensor  # int64 [N], `PoolState.usage` at that time
    sizes: torch.Tensor  # int32 [P, NUM_EDGES], how many would be left at each edge
    edge: torch.Tensor  # int64 [2], an expert below it leaves; as it was and as it is
    absent: torch.Tensor  # int64 [1], experts that the pool had lacked until then

    @classmethod
    def unknown(cls, num_experts: int, device: torch.device) -> GhostCache:
        """Before the first step: that begins with what the pool holds."""
        return cls(**zeros(_sizes(num_experts), device))


def _sizes(num_experts: int) -> Sizes:
    """Of `GhostCache`."""
    return {
        "member": (torch.int32, (num_experts,)),
        "score": (torch.int64, (num_experts,)),
        "sizes": (torch.int32, (triton.cdiv(num_experts, BLOCK), NUM_EDGES)),
        "edge": (torch.int64, (2,)),
        "absent": (torch.int64, (1,)),
    }


def check_ghost(ghost: GhostCache | None, num_experts: int, device: torch.device) -> None:
    if ghost is not None:
        check_all(ghost, _sizes(num_experts), device)


def _edges_reference(edge: int, pool: PoolState) -> torch.Tensor:
    tick, now = (int(pool.rule[place]) for place in (RULE_TICK, RULE_NOW))
    near = edge + torch.arange(NEAR) * (tick >> 3)
    back = torch.arange(FAR) - AFTER
    far = now - tick * back * back.abs()
    return torch.cat((near, far)).clamp(min=edge).to(pool.rule.device)


def size_up_reference(
    hit: torch.Tensor, is_first: bool, pool: PoolState, ghost: GhostCache
) -> None:
    """How many would be left at each edge, now that the last step has used those that are `hit`
    (int32 [N], 0 or 1). With `is_first` nothing is known of a last step: the ghost begins with
    the experts that the pool holds."""
    if is_first:
        ghost.member.copy_(pool.slot_of >= 0)
        hit = torch.zeros_like(hit)
    edge = 0 if is_first else int(ghost.edge[1])
    ghost.edge[0] = edge
    high = pool.usage[:, None] >= _edges_reference(edge, pool)
    stays = ((hit > 0) | (ghost.member > 0))[:, None] & high
    for part, rows in zip(ghost.sizes, stays.split(BLOCK), strict=True):
        part.copy_(rows.sum(0))


@triton.jit
def _edges(edge, pool):
    j = tl.arange(0, _NUM_EDGES)
    tick, now = tl.load(pool.rule + _RULE_TICK), tl.load(pool.rule + _RULE_NOW)
    back = j - _NEAR - _AFTER
    far = now - tick * back * tl.abs(back)
    return tl.maximum(tl.where(j < _NEAR, edge + j * (tick >> 3), far), edge)


@triton.jit
def size_up(expert, inside, hit, is_first, pool, ghost):
    """The same for the experts of a program; see `size_up_reference`."""
    there = tl.load(pool.slot_of + expert, mask=inside, other=-1) >= 0
    member = tl.load(ghost.member + expert, mask=inside, other=0)
    member = tl.where(is_first, there.to(tl.int32), member)
    tl.store(ghost.member + expert, member, mask=inside)
    edge = tl.where(is_first, 0, tl.load(ghost.edge + 1))
    if tl.program_id(0) == 0:
        tl.store(ghost.edge, edge)
    usage = tl.load(pool.usage + expert, mask=inside, other=0)
    used = inside & (hit > 0) & (is_first == 0)
    high = usage[:, None] >= _edges(edge, pool)[None, :]
    stays = (used | (member > 0))[:, None] & high
    j = tl.arange(0, _NUM_EDGES)
    tl.store(ghost.sizes + tl.program_id(0) * _NUM_EDGES + j, tl.sum(stays.to(tl.int32), 0))


def go_on_reference(hit: torch.Tensor, is_first: bool, pool: PoolState, ghost: GhostCache) -> None:
    """Move the edge, count what the ghost and the pool have missed in the last step, and let go
    the experts below it; `hit` and `is_first` as before."""
    used = (hit > 0) & (not is_first)
    old = int(ghost.edge[0])
    edges = _edges_reference(old, pool)
    fits = ghost.sizes.sum(0) >= len(pool.owner)
    new = int(edges[fits].max()) if fits.any() else old
    place = torch.arange(len(used), device=used.device)
    edge = old + (new - old) * place // len(used)
    missed = used & ((ghost.member == 0) | (ghost.score < edge))
    absent = pool.counters[MISSES] + pool.counters[PREFETCH_HITS]
    if not is_first:
        pool.counters[MISSED_BY_COUNTS] += missed.sum()
        pool.counters[MISSED_BY_FORECAST] += absent - ghost.absent[0]
    ghost.absent[0] = absent
    ghost.member.copy_((used | (ghost.member > 0)) & (pool.usage >= new))
    ghost.score.copy_(pool.usage)
    ghost.edge[1] = new


@triton.jit
def go_on(
    expert, inside, hit, is_first, usage, pool, ghost, num_experts, num_slots, num_parts,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The same for the experts of a program, whose scores are `usage`; see `go_on_reference`."""
    program = tl.program_id(0)
    p, j = tl.arange(0, BLOCK_P), tl.arange(0, _NUM_EDGES)
    at = ghost.sizes + p[:, None] * _NUM_EDGES + j[None, :]
    sizes = tl.sum(tl.load(at, mask=(p < num_parts)[:, None], other=0), 0)
    old = tl.load(ghost.edge)
    new = tl.max(tl.where(sizes >= num_slots, _edges(old, pool), old), 0)
    member = tl.load(ghost.member + expert, mask=inside, other=0)
    score = tl.load(ghost.score + expert, mask=inside, other=0)
    absent = tl.load(pool.counters + _MISSES) + tl.load(pool.counters + _PREFETCH_HITS)
    before = tl.load(ghost.absent)
    lacked = tl.load(pool.counters + _BY_FORECAST) + tl.where(is_first, 0, absent - before)
    used = inside & (hit > 0) & (is_first == 0)
    missed = used & ((member == 0) | (score < old + (new - old) * expert // num_experts))
    num_missed = tl.sum(missed.to(tl.int64), 0)
    tl.debug_barrier()  # all threads have read what one of them writes now
    stays = (used | (member > 0)) & (usage >= new)
    tl.store(ghost.member + expert, stays.to(tl.int32), mask=inside)
    tl.store(ghost.score + expert, usage, mask=inside)
    if num_missed > 0:
        tl.atomic_add(pool.counters + _BY_COUNTS, num_missed)
    if program == 0:
        tl.store(pool.counters + _BY_FORECAST, lacked)
        tl.store(ghost.absent, absent)
        tl.store(ghost.edge + 1, new)
