"""Resolving wanted experts to slots: the lookup table, and a victim for every miss."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check
from seqmoe_kernels.common.clock import add_span_reference, now_ns, now_ns_reference
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.eviction.expected_use import ExpectedUse
from seqmoe_kernels.eviction.units import GAP_SHIFT, NEVER
from seqmoe_kernels.eviction.victims import victim_scores, victim_scores_reference
from seqmoe_kernels.pool.landing import (
    check_flights,
    land_prefetches,
    land_reference,
    look_at_flights,
)
from seqmoe_kernels.state import (
    EMPTY,
    FETCHING,
    HITS,
    MISSES,
    NO_VICTIM,
    NUM_COUNTERS,
    NUM_MARKS,
    READY,
    RULE_NOW,
    RULE_TICK,
    STALL_BEGAN,
    STALL_ENDED,
    STALL_NS,
    Flights,
    PoolState,
)

MAX_SLOTS = 16384  # one program holds the scores of all slots in its registers

_GAP_SHIFT = tl.constexpr(GAP_SHIFT)
_NEVER, _EMPTY, _FETCHING, _READY = map(tl.constexpr, (NEVER, EMPTY, FETCHING, READY))
_HITS, _MISSES, _NO_VICTIM = map(tl.constexpr, (HITS, MISSES, NO_VICTIM))
_RULE_TICK, _RULE_NOW = map(tl.constexpr, (RULE_TICK, RULE_NOW))
_STALL_NS, _STALL_BEGAN, _STALL_ENDED = map(tl.constexpr, (STALL_NS, STALL_BEGAN, STALL_ENDED))


class Resolved(NamedTuple):
    """Where n wanted experts are, and which of them must be fetched (rows past num_misses: -1)."""

    slots: torch.Tensor  # int32 [n], the slot of each wanted expert, -1 if there was no victim
    miss_ids: torch.Tensor  # int32 [n], flat expert ids in the order of `wanted`
    miss_slots: torch.Tensor  # int32 [n], the slot that each one must be copied to
    num_misses: torch.Tensor  # int32 [1]


def resolve_reference(
    wanted: torch.Tensor,
    pool: PoolState,
    flights: Flights | None = None,
    expected_use: ExpectedUse | None = None,
    first_to_come: int = 0,
) -> Resolved:
    _count_stall_reference(pool)
    landed = None if flights is None else land_reference(wanted, pool, flights)
    pool.clock.add_(1)
    pool.usage[wanted.long()] = _scores_reference(wanted.long(), pool)
    slots = pool.slot_of[wanted.long()]
    hit = slots >= 0
    pool.score[slots[hit].long()] = pool.usage[wanted[hit].long()]
    candidates = victim_scores_reference(pool, expected_use, first_to_come)
    candidates[slots[hit].long()] = NEVER
    if landed is not None:
        candidates[landed.kept] = NEVER
    missed = (~hit).nonzero().flatten().tolist()
    for i in missed:
        slots[i] = _assign_reference(int(wanted[i]), candidates, pool)
    if expected_use is not None:
        there = slots >= 0
        worth = expected_use.again[wanted[there].long()]
        expected_use.slot_passed[slots[there].long()] = worth
    num_late = 0
    if flights is not None and landed is not None:
        num_late = int(landed.late.sum())
        absent = ~hit | landed.early | landed.late
        flights.absent[: len(wanted)] = absent[: len(flights.absent)].int()
        flights.control.copy_(pool.clock * 2 + bool(missed))
        pool.counters[STALL_NS] += landed.waited_ns
    pool.counters[HITS] += len(wanted) - len(missed) - num_late
    pool.counters[MISSES] += len(missed) + num_late
    miss_ids, miss_slots = torch.full_like(slots, -1), torch.full_like(slots, -1)
    miss_ids[: len(missed)] = wanted[~hit]
    miss_slots[: len(missed)] = slots[~hit]
    num_misses = torch.tensor([len(missed)], dtype=torch.int32, device=wanted.device)
    if missed:
        pool.marks[STALL_BEGAN] = now_ns_reference()
    return Resolved(slots, miss_ids, miss_slots, num_misses)


def _count_stall_reference(pool: PoolState) -> None:
    """Add what the last fetch took; `fetch` cannot, as many programs share its work."""
    began, ended = pool.marks[STALL_BEGAN], pool.marks[STALL_ENDED]
    if ended:
        add_span_reference(pool.counters[STALL_NS : STALL_NS + 1], began, int(ended))
    began.zero_(), ended.zero_()


def _scores_reference(wanted: torch.Tensor, pool: PoolState) -> torch.Tensor:
    """What a use now makes of the experts' scores."""
    if not pool.rule[RULE_TICK]:
        return pool.clock.expand(len(wanted))
    usage, now = pool.usage[wanted], pool.rule[RULE_NOW]
    gap = ((usage - now).abs() >> GAP_SHIFT).clamp(max=len(pool.log_sums) - 1)
    return torch.maximum(usage, now) + pool.log_sums[gap]


def _assign_reference(expert: int, candidates: torch.Tensor, pool: PoolState) -> int:
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
    pool.score[victim] = pool.usage[expert]
    candidates[victim] = NEVER
    return victim


@triton.jit
def _assign(pool, expert, victim, score):
    """Give `expert` the slot `victim`. All threads read before the barrier, one writes after it."""
    old = tl.load(pool.owner + victim)
    tag = tl.load(pool.assigned_tag + victim) + 1
    tl.debug_barrier()
    if old >= 0:
        tl.store(pool.slot_of + old, -1)
    tl.store(pool.slot_of + expert, victim)
    tl.store(pool.owner + victim, expert)
    tl.store(pool.state + victim, _READY)
    tl.store(pool.assigned_tag + victim, tag)
    tl.store(pool.landed_tag + victim, tag)
    tl.store(pool.score + victim, score)


@triton.jit
def _scores(expert, inside, pool, clock, num_gaps):
    """What a use now makes of the experts' scores."""
    score = tl.where(inside, clock, 0)
    if tl.load(pool.rule + _RULE_TICK) > 0:
        now = tl.load(pool.rule + _RULE_NOW)
        usage = tl.load(pool.usage + expert, mask=inside, other=0)
        gap = tl.minimum(tl.abs(usage - now) >> _GAP_SHIFT, num_gaps - 1)
        score = tl.maximum(usage, now) + tl.load(pool.log_sums + gap, mask=inside, other=0)
    return score


@triton.jit
def resolve_experts(
    expert,
    n,
    pool,
    flights,
    seen,
    expected_use,
    first_to_come,
    resolved,
    num_slots,
    num_gaps,
    BLOCK_S: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """One event for the first `n` of the distinct flat ids `expert` (int32, a power of two of them,
    all at least 0); see `resolve`. `seen` comes from `look_at_flights`. With `expected_use` the
    layers before the id `first_to_come` are passed. `flights`, whose `absent` has TOP_K elements,
    and `expected_use` may be None. For kernels of a single program."""
    # One program, many threads: a barrier stands between every read of a place and the write to it
    # by another thread, and between a write and its reading back.
    i = tl.arange(0, expert.shape[0])
    inside = i < n
    found = tl.load(pool.slot_of + expert, mask=inside, other=0)
    now = tl.load(pool.clock) + 1
    hits, misses = tl.load(pool.counters + _HITS), tl.load(pool.counters + _MISSES)
    lost = tl.load(pool.counters + _NO_VICTIM)
    stall = tl.load(pool.counters + _STALL_NS)
    began, ended = tl.load(pool.marks + _STALL_BEGAN), tl.load(pool.marks + _STALL_ENDED)
    score = _scores(expert, inside, pool, now, num_gaps)
    if expected_use is not None:
        worth = tl.load(expected_use.again + expert, mask=inside, other=0)
    if flights is not None:
        early, late, place, kept, waited_ns = land_prefetches(
            expert, inside, now, pool, flights, seen
        )
        found = tl.where(place >= 0, place, found)  # the table may not know it yet
        num_late = tl.sum(late.to(tl.int32), 0)
        hits, misses, stall = hits - num_late, misses + num_late, stall + waited_ns
    miss, hit = inside & (found < 0), inside & (found >= 0)
    rank = tl.cumsum(miss.to(tl.int32), 0) - 1
    num_misses = tl.sum(miss.to(tl.int32), 0)
    tl.debug_barrier()
    tl.store(pool.clock, now)
    tl.store(pool.usage + expert, score, mask=inside)
    tl.store(pool.counters + _HITS, hits + n - num_misses)
    tl.store(pool.counters + _MISSES, misses + num_misses)
    tl.store(pool.counters + _STALL_NS, stall + tl.where(ended > began, ended - began, 0))
    tl.store(pool.marks + _STALL_ENDED, began * 0)
    tl.store(resolved.num_misses, num_misses)
    tl.store(resolved.slots + i, found, mask=hit)
    tl.store(resolved.miss_ids + rank, expert, mask=miss)
    tl.store(resolved.miss_ids + i, -1, mask=inside & (i >= num_misses))
    tl.store(resolved.miss_slots + i, -1, mask=inside & (i >= num_misses))
    if flights is not None:
        absent = early | late | miss
        tl.store(flights.absent + i, absent.to(tl.int32), mask=inside & (i < TOP_K))
        tl.store(flights.control, now * 2 + (num_misses > 0).to(tl.int64))
    if num_misses > 0:
        slot = tl.arange(0, BLOCK_S)
        if flights is not None:
            kept_score = tl.load(pool.score + kept, mask=kept >= 0, other=0)
            tl.debug_barrier()
            tl.store(pool.score + kept, _NEVER, mask=kept >= 0)
        tl.store(pool.score + found, _NEVER, mask=hit)  # what is wanted now is no victim
        tl.debug_barrier()
        candidates = victim_scores(pool, expected_use, first_to_come, num_slots, slot)
        for r in range(num_misses):
            here = miss & (rank == r)
            least = tl.min(candidates, 0)
            victim = tl.min(tl.where(candidates == least, slot, BLOCK_S), 0)
            if least == _NEVER:
                victim = -1
                lost += 1
            else:
                new = tl.sum(tl.where(here, expert, 0), 0)
                _assign(pool, new, victim, tl.sum(tl.where(here, score, 0), 0))
                if expected_use is not None:
                    tl.store(expected_use.slot_passed + victim, tl.sum(tl.where(here, worth, 0), 0))
            tl.store(resolved.slots + i, victim, mask=here)
            tl.store(resolved.miss_slots + r, victim)
            candidates = tl.where(slot == victim, _NEVER, candidates)
        tl.debug_barrier()
        tl.store(pool.counters + _NO_VICTIM, lost)
        tl.store(pool.marks + _STALL_BEGAN, now_ns())
        if flights is not None:
            tl.store(pool.score + kept, kept_score, mask=kept >= 0)
            tl.debug_barrier()  # some of them may be wanted
    tl.store(pool.score + found, score, mask=hit)
    if expected_use is not None:
        tl.store(expected_use.slot_passed + found, worth, mask=hit)


@triton.jit
def _resolve_kernel(
    wanted,
    pool,
    flights,
    resolved,
    n,
    num_slots,
    num_gaps,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TOP_K: tl.constexpr,
):
    i = tl.arange(0, BLOCK_N)
    expert = tl.load(wanted + i, mask=i < n, other=0)
    seen = None
    if flights is not None:
        seen = look_at_flights(pool, flights)
    resolve_experts(
        expert, n, pool, flights, seen, None, 0, resolved, num_slots, num_gaps, BLOCK_S, TOP_K
    )


def check_pool(pool: PoolState, device: torch.device) -> None:
    num_slots = pool.owner.shape[0]
    if not 1 <= num_slots <= MAX_SLOTS:
        raise ValueError(f"the pool has {num_slots} slots, expected 1 to {MAX_SLOTS}")
    sizes = {"slot_of": -1, "usage": len(pool.slot_of), "rule": 2, "log_sums": -1, "clock": 1}
    sizes |= {"counters": NUM_COUNTERS, "marks": NUM_MARKS}
    narrow = ("slot_of", "owner", "state", "log_sums")
    for name, tensor in pool._asdict().items():
        dtype = torch.int32 if name in narrow else torch.int64
        check(name, tensor, dtype, (sizes.get(name, num_slots),), device)


def warps_for(block_slots: int) -> int:
    """Enough threads to hold the scores of all slots, few enough to agree quickly."""
    return min(max(block_slots // 2048, 4), 16)


@verb(lambda wanted, pool, flights=None: resolve_reference(wanted, pool, flights))
def resolve(wanted: torch.Tensor, pool: PoolState, flights: Flights | None = None) -> Resolved:
    """Look up the slots of `wanted` (int32 [n], distinct flat expert ids) and assign the misses.

    One event: `pool.clock` goes up by one, and every wanted expert gets a new score by
    `pool.rule`, which its slot takes over. A miss, in the order of `wanted`, takes the slot of the
    smallest (score, slot), EMPTY slots first, that is neither FETCHING nor holds a wanted expert;
    its old owner leaves the lookup table, its tags go up. Without such a slot the miss gets slot -1
    and is counted in NO_VICTIM. The weights are not moved here: `fetch` the result before reading
    the slots. Updates `pool` in place.

    With `flights`, copies that have landed enter the lookup table first, with the score that their
    expert has kept. A wanted expert that is under way and about to land is waited for, no longer
    than PATIENCE_NS; another one is a miss, and its copy is dropped when it lands. A slot whose
    copy is for an event to come is no victim.
    """
    check("wanted", wanted, torch.int32, (-1,), wanted.device)
    check_pool(pool, wanted.device)
    if flights is not None:
        check_flights(flights, wanted.device)
    n, num_slots = wanted.shape[0], pool.owner.shape[0]
    if n == 0:
        raise ValueError("wanted is empty, expected at least one expert")
    resolved = Resolved(*(wanted.new_empty(size) for size in (n, n, n, 1)))
    block_slots = triton.next_power_of_2(num_slots)
    _resolve_kernel[(1,)](
        wanted=wanted,
        pool=pool,
        flights=flights,
        resolved=resolved,
        n=n,
        num_slots=num_slots,
        num_gaps=len(pool.log_sums),
        BLOCK_N=triton.next_power_of_2(n),
        BLOCK_S=block_slots,
        TOP_K=0 if flights is None else len(flights.absent),
        num_warps=warps_for(block_slots),
        enable_fp_fusion=True,
    )
    return resolved
