"""Landing: what a lookup does first when there are prefetches.

The copies run beside the stream of the kernels. A slot that is FETCHING is made READY, and its
expert enters the lookup table, only when the tag that landed is the one that was assigned last. The
kernel or the thread, whichever copies, lands it behind the record. Minus the tag says that the copy
was refused or cut short. No slot is read on another ground.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check, check_pinned
from seqmoe_kernels.common.clock import now_ns, now_ns_reference
from seqmoe_kernels.state import (
    DROPPED,
    EMPTY,
    FETCHING,
    LANDED,
    LATE,
    NUM_FLIGHTS,
    NUM_REQUESTS,
    NUM_RULES,
    PATIENCE_NS,
    PREFETCH_HITS,
    READY,
    REQUEST_WORDS,
    Flights,
    PoolState,
)

MAX_LOOKS = 1 << 16  # for a landing tag, some 0.5 us each; in the interpreter, without a clock, one
_NAP_S = 20e-6

_EMPTY, _FETCHING, _READY = map(tl.constexpr, (EMPTY, FETCHING, READY))
_PREFETCH_HITS, _LATE = tl.constexpr(PREFETCH_HITS), tl.constexpr(LATE)
_DROPPED, _LANDED = tl.constexpr(DROPPED), tl.constexpr(LANDED)
_PATIENCE_NS, _NUM_FLIGHTS = tl.constexpr(PATIENCE_NS), tl.constexpr(NUM_FLIGHTS)
_MAX_LOOKS = tl.constexpr(1 if triton.knobs.runtime.interpret else MAX_LOOKS)


class Landed(NamedTuple):
    """What an event has found out: `early` and `late` bool [n] say which of the wanted have landed
    in time, and which were waited for; `kept` are slots that must not become victims; the event
    waited for `waited_ns`."""

    early: torch.Tensor
    late: torch.Tensor
    kept: list[int]
    waited_ns: int


def land_reference(wanted: torch.Tensor, pool: PoolState, flights: Flights) -> Landed:
    """To be called before the event counts itself."""
    now, waited_ns = int(pool.clock) + 1, 0
    places = {expert: i for i, expert in enumerate(wanted.tolist())}
    under_way = [f for f in _slots(flights) if _is_under_way(f[1], pool)]
    late = [f for f in under_way if int(pool.owner[f[1]]) in places]
    patience = int(flights.rules[PATIENCE_NS])
    began = now_ns_reference()
    hopeful = [s for i, s in late if int(flights.due_ns[i]) - began < patience]
    if hopeful:
        while _any_under_way(hopeful, pool) and now_ns_reference() < began + patience:
            time.sleep(_NAP_S)
        waited_ns = now_ns_reference() - began
    early_at: list[int] = []
    late_at: list[int] = []
    kept: list[int] = []
    for i, slot in _slots(flights):
        expert, is_late = int(pool.owner[slot]), (i, slot) in late
        if _is_under_way(slot, pool):
            if is_late:
                pool.owner[slot] = -1
                pool.counters[DROPPED] += 1
            continue
        if pool.state[slot] == FETCHING:
            _commit_reference(slot, pool)
        if pool.state[slot] == READY and expert in places:
            (late_at if is_late else early_at).append(places[expert])
        if pool.state[slot] == READY and flights.event[i] > now:
            kept.append(slot)
        else:
            flights.slot[i] = -1
    pool.counters[PREFETCH_HITS] += len(early_at)
    pool.counters[LATE] += len(late_at)
    early, late_mask = (torch.zeros_like(wanted, dtype=torch.bool) for _ in range(2))
    early[early_at], late_mask[late_at] = True, True
    return Landed(early, late_mask, kept, waited_ns)


def _slots(flights: Flights) -> list[tuple[int, int]]:
    return [(i, slot) for i, slot in enumerate(flights.slot.tolist()) if slot >= 0]


def _is_under_way(slot: int, pool: PoolState) -> bool:
    fetching = pool.state[slot] == FETCHING
    return bool(fetching and abs(int(pool.landed_tag[slot])) != int(pool.assigned_tag[slot]))


def _any_under_way(slots: list[int], pool: PoolState) -> bool:
    return any(_is_under_way(slot, pool) for slot in slots)


def _commit_reference(slot: int, pool: PoolState) -> None:
    """A copy has landed, or was refused."""
    refused = int(pool.landed_tag[slot]) < 0
    pool.counters[LANDED] += not refused
    if refused or (expert := int(pool.owner[slot])) < 0:
        pool.owner[slot], pool.state[slot] = -1, EMPTY
        return
    pool.slot_of[expert], pool.state[slot] = slot, READY
    pool.score[slot] = pool.usage[expert]


# Tags land while they are read, and time goes by: two threads may see different values. Those that
# a decision rests on are therefore written down by one, and read back by all.
@triton.jit
def agreed_now(flights):
    """The time, the same for all threads of the program; ends with a barrier."""
    tl.store(flights.agreed + _NUM_FLIGHTS, now_ns())
    tl.debug_barrier()
    now = tl.load(flights.agreed + _NUM_FLIGHTS, volatile=True)
    tl.debug_barrier()
    return now


@triton.jit
def _look(pool, flights, slot, fetching):
    """The tags that have landed in the slots that are `fetching`, and the time; agreed."""
    f = tl.arange(0, _NUM_FLIGHTS)
    tags = tl.load(pool.landed_tag + slot, mask=fetching, other=0, volatile=True)
    tl.store(flights.agreed + f, tags)
    now = agreed_now(flights)
    tags = tl.load(flights.agreed + f, volatile=True)
    tl.debug_barrier()
    return tags, now


@triton.jit
def look_at_flights(pool, flights):
    """What `land_prefetches` wants to know, [F] each: slot, event, due_ns, and of the slot its
    owner, state, assigned tag and landed tag, agreed. An event loads it ahead of other work."""
    f = tl.arange(0, _NUM_FLIGHTS)
    slot = tl.load(flights.slot + f)
    event, due = tl.load(flights.event + f), tl.load(flights.due_ns + f)
    owner, state, tag, landed = slot, slot, event, event
    if tl.max(slot, 0) >= 0:
        there = slot >= 0
        landed = tl.load(pool.landed_tag + slot, mask=there, other=0, volatile=True)
        owner = tl.load(pool.owner + slot, mask=there, other=-1)
        state = tl.load(pool.state + slot, mask=there, other=_EMPTY)
        tag = tl.load(pool.assigned_tag + slot, mask=there, other=0)
        tl.store(flights.agreed + f, landed)
        tl.debug_barrier()
        landed = tl.load(flights.agreed + f, volatile=True)
    return slot, event, due, owner, state, tag, landed


@triton.jit
def land_prefetches(expert, inside, now, pool, flights, seen):
    """The same for `expert` [n] where `inside`, in the event `now`; see `Landed`. Returns early,
    late (bool) and the slot (-1 for none) of each expert that has landed, for each flight the slot
    kept or -1, then waited_ns. For kernels of a single program, which put a barrier behind it
    before they read what it has written."""
    came, kept, waited_ns = expert * 0, seen[0], now * 0
    if tl.max(seen[0], 0) >= 0:
        came, kept, waited_ns = _land(expert, inside, now, pool, flights, seen)
    return (came >> 20 & 1) > 0, (came >> 21) > 0, (came & 0xFFFFF) - 1, kept, waited_ns


@triton.jit
def _land(expert, inside, now, pool, flights, seen):
    """For each expert in one number, slot + 1 and how it came there; and the rest. A reduction
    takes longer than all else here: most events get by with two."""
    f = tl.arange(0, _NUM_FLIGHTS)
    slot, event, due, owner, state, tag, landed = seen
    match = (expert[:, None] == owner[None, :]) & inside[:, None] & (slot >= 0)[None, :]
    wanted = tl.max(match.to(tl.int32), 0) > 0
    fetching = state == _FETCHING
    there = (landed == tag) | (landed == -tag)
    late = fetching & wanted & (there == 0)
    waited_ns = now * 0
    news = _news(owner, state, tag, landed, wanted, late)
    if (news >> 12 & 63) > 0:
        landed, waited_ns = _wait(pool, flights, slot, due, tag, landed, fetching, late)
        news = _news(owner, state, tag, landed, wanted, late)
    there = (landed == tag) | (landed == -tag)
    ready = fetching & (landed == tag) & (owner >= 0)
    here = ready | (state == _READY)
    kept = here & (event > now)
    under_way = fetching & (there == 0)
    tl.store(flights.slot + f, -1, mask=(slot >= 0) & (under_way == 0) & (kept == 0))
    if news > 0:
        _note_landing(pool, slot, owner, fetching & there, ready, late & under_way, news)
    came = expert * 0
    if (news & 0xFFF) > 0:
        early = here & wanted & (late == 0)
        how = slot + 1 + (early.to(tl.int32) << 20) + ((ready & late).to(tl.int32) << 21)
        came = tl.max(tl.where(match & here[None, :], how[None, :], 0), 1)
    return came, tl.where(kept, slot, -1), waited_ns


@triton.jit
def _news(owner, state, tag, landed, wanted, late):
    """What has become of the flights, counted six bits each: in time, waited for, late and not
    there, landed whole, landed or refused."""
    fetching = state == _FETCHING
    whole = fetching & (landed == tag)
    arrived = whole | (fetching & (landed == -tag))
    ready = whole & (owner >= 0)
    early = (ready | (state == _READY)) & wanted & (late == 0)
    news = early.to(tl.int32) + ((ready & late).to(tl.int32) << 6)
    news += ((late & (arrived == 0)).to(tl.int32) << 12) + (whole.to(tl.int32) << 18)
    return tl.sum(news + (arrived.to(tl.int32) << 24), 0)


@triton.jit
def _wait(pool, flights, slot, due, tag, landed, fetching, late):
    """Look for the tags of those that are `late` and about to land; the tags, and for how long."""
    tl.debug_barrier()  # all threads have read what was agreed
    began = agreed_now(flights)
    patience = tl.load(flights.rules + _PATIENCE_NS)
    hopeful = late & (due - began < patience)
    missing = tl.sum(hopeful.to(tl.int32), 0)
    looks = _MAX_LOOKS + missing * 0
    waited_ns = began * 0
    while (missing > 0) & (looks > 0):
        landed, time = _look(pool, flights, slot, fetching)
        there = (landed == tag) | (landed == -tag)
        missing = tl.sum((hopeful & (there == 0)).to(tl.int32), 0)
        looks = tl.where(time < began + patience, looks - 1, 0)
        waited_ns = time - began
    return landed, waited_ns


@triton.jit
def _note_landing(pool, slot, owner, arrived, ready, lost, news):
    """Write down what has become of the flights; `news` has the counts."""
    score = tl.load(pool.usage + owner, mask=ready, other=0)
    in_time, late = tl.load(pool.counters + _PREFETCH_HITS), tl.load(pool.counters + _LATE)
    dropped = tl.load(pool.counters + _DROPPED)
    whole = tl.load(pool.counters + _LANDED)
    tl.debug_barrier()
    tl.store(pool.slot_of + owner, slot, mask=ready)
    tl.store(pool.state + slot, tl.where(ready, _READY, _EMPTY), mask=arrived)
    tl.store(pool.owner + slot, -1, mask=(arrived & (ready == 0)) | lost)
    tl.store(pool.score + slot, score, mask=ready)
    tl.store(pool.counters + _PREFETCH_HITS, in_time + (news & 63))
    tl.store(pool.counters + _LATE, late + (news >> 6 & 63))
    tl.store(pool.counters + _DROPPED, dropped + (news >> 12 & 63))
    tl.store(pool.counters + _LANDED, whole + (news >> 18 & 63))


_NARROW = ("slot", "arrived", "absent", "candidates", "predicted")


def check_flights(flights: Flights, device: torch.device) -> None:
    layers, distances, num_predicted = flights.predicted.shape
    sizes: dict[str, tuple[int, ...]] = {
        "slot": (NUM_FLIGHTS,),
        "event": (NUM_FLIGHTS,),
        "due_ns": (NUM_FLIGHTS,),
        "rules": (NUM_RULES,),
        "agreed": (NUM_FLIGHTS + 1,),
        "absent": (-1,),
        "candidates": (distances * num_predicted,),
        "predicted": (layers, distances, num_predicted),
        "accuracy": (distances, 3),
        "requests": (NUM_REQUESTS, REQUEST_WORDS),
    }
    for name, tensor in flights._asdict().items():
        dtype = torch.int32 if name in _NARROW else torch.int64
        place = tensor.device if name in ("requests", "control") else device
        check(name, tensor, dtype, sizes.get(name, (1,)), place)
        check_pinned(name, tensor, device)
