"""Asking for prefetches: which experts the next layers will want, whose slots they get, and the
requests that leave for who copies: a part of `schedule_prefetches`, or of the launch of `fetch`.

The routers of the next layers on the present state name experts (look-ahead). Those that are absent
and can land in time are asked for, if enough of the names so many layers ahead have been right: the
earliest event first, within it the likeliest. Behind them come those that were foreseen for later
layers when the step began.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.common.clock import now_ns_reference
from seqmoe_kernels.eviction.expected_use import ExpectedUse, check_expected_use
from seqmoe_kernels.eviction.units import NEVER
from seqmoe_kernels.eviction.victims import poorest, victim_scores, victim_scores_reference
from seqmoe_kernels.pool.landing import agreed_now, check_flights
from seqmoe_kernels.pool.resolve import check_pool
from seqmoe_kernels.pool.step_ring import LOW_BITS, NUMBER_BITS
from seqmoe_kernels.prefetch.lookahead import (
    Ahead,
    Asking,
    judge_names,
    judge_reference,
    named_experts,
    named_reference,
    worthy_distances,
    worthy_reference,
)
from seqmoe_kernels.state import (
    COPY_NS,
    DELAY_NS,
    EMPTY,
    FETCHING,
    IN_FLIGHT,
    LAYER_NS,
    MOST_KEPT,
    NUM_FLIGHTS,
    NUM_REQUESTS,
    PER_LAYER,
    PREFETCHES,
    REQUEST_WORDS,
    SLACK_NS,
    Flights,
    PoolState,
)

SLOT_BITS = 15
_NOBODY = 1 << 20  # a rank behind all others

_EMPTY, _FETCHING, _NEVER = map(tl.constexpr, (EMPTY, FETCHING, NEVER))
_IN_FLIGHT, _PER_LAYER, _MOST_KEPT = map(tl.constexpr, (IN_FLIGHT, PER_LAYER, MOST_KEPT))
_LAYER_NS, _COPY_NS, _DELAY_NS = map(tl.constexpr, (LAYER_NS, COPY_NS, DELAY_NS))
_SLACK_NS, _PREFETCHES = map(tl.constexpr, (SLACK_NS, PREFETCHES))
_NUM_FLIGHTS, _NUM_REQUESTS = map(tl.constexpr, (NUM_FLIGHTS, NUM_REQUESTS))
_REQUEST_WORDS, _SLOT_BITS, _NOBODY_K = map(tl.constexpr, (REQUEST_WORDS, SLOT_BITS, _NOBODY))
_NUMBER_BITS, _LOW_BITS = map(tl.constexpr, (NUMBER_BITS, LOW_BITS))


class Request(NamedTuple):
    """What the host reads: copy the record `expert` into `slot`, then land `tag`; it is for the
    event of that clock."""

    tag: int
    slot: int
    expert: int
    event: int


def read_request(requests: torch.Tensor, number: int) -> Request | None:
    """Request `number` of a ring on the host, None while it is not all there."""
    words = requests[number % NUM_REQUESTS].tolist()
    if any((word ^ number) & LOW_BITS for word in words):
        return None
    tag, place, event = (word >> NUMBER_BITS for word in words)
    return Request(tag, place % (1 << SLOT_BITS), place >> SLOT_BITS, event)


def request_reference(ahead: Ahead, pool: PoolState, flights: Flights) -> None:
    if not flights.rules[IN_FLIGHT]:
        return
    num_experts = ahead.asking.num_experts
    coming = {int(pool.owner[slot]) for slot in flights.slot.tolist() if slot >= 0}
    names, worthy = named_reference(ahead, flights), worthy_reference(flights)
    candidates, resident = [], []
    for distance, experts in enumerate(names, 1):
        row = flights.names[ahead.layer + distance, distance - 1].fill_(-1)
        for rank, expert in enumerate(experts):
            if expert < 0:
                continue
            slot = int(pool.slot_of[expert])
            if slot >= 0:
                resident.append(slot)
            elif expert not in coming and worthy[distance - 1]:
                candidates.append((distance, expert))
            if slot < 0 or expert in coming:
                row[rank] = expert
    for hint in flights.candidates.tolist() if ahead.asking.hinted else ():
        distance, slot = hint // num_experts - ahead.layer, int(pool.slot_of[hint])
        if hint >= 0 and distance > 0 and slot >= 0:
            resident.append(slot)
        elif hint >= 0 and distance > flights.names.shape[1] and hint not in coming:
            candidates.append((distance, hint))
    _start_reference(ahead, candidates, resident, pool, flights)
    judge_reference(ahead, flights)


def _start_reference(
    ahead: Ahead,
    candidates: list[tuple[int, int]],
    resident: list[int],
    pool: PoolState,
    flights: Flights,
) -> None:
    rules, now = flights.rules.tolist(), now_ns_reference()
    taken = [slot for slot in flights.slot.tolist() if slot >= 0]
    under_way = [f for f in range(NUM_FLIGHTS) if _fetching(int(flights.slot[f]), pool)]
    room = min(rules[IN_FLIGHT] - len(under_way), rules[PER_LAYER], rules[MOST_KEPT] - len(taken))
    if room <= 0 or not candidates:
        return
    expected_use = ahead.asking.expected_use
    first_to_come = (ahead.layer + 1) * ahead.asking.num_experts
    scores = victim_scores_reference(pool, expected_use, first_to_come)
    barred = [slot for slot in ahead.slots.tolist() if slot >= 0]
    scores[barred + resident + taken] = NEVER
    due = max([now + rules[DELAY_NS], *(int(flights.due_ns[f]) for f in under_way)])
    for _ in range(room):
        due += rules[COPY_NS]
        latest = due - now - rules[SLACK_NS]
        able = [c for c in candidates if latest <= c[0] * rules[LAYER_NS]]
        victim = int(scores.argmin())
        if not able or scores[victim] == NEVER:
            return
        distance, expert = able[0]
        candidates.remove(able[0])
        scores[victim] = NEVER
        _assign_reference(expert, victim, distance, due, pool, flights, expected_use)


def _fetching(slot: int, pool: PoolState) -> bool:
    return slot >= 0 and int(pool.state[slot]) == FETCHING


def _assign_reference(
    expert: int,
    victim: int,
    distance: int,
    due: int,
    pool: PoolState,
    flights: Flights,
    expected_use: ExpectedUse | None,
) -> None:
    if expected_use is not None:
        expected_use.slot_coming[victim] = expected_use.coming[expert]
        expected_use.slot_passed[victim] = expected_use.passed[expert]
    if (old := int(pool.owner[victim])) >= 0:
        pool.slot_of[old] = -1
    pool.owner[victim], pool.state[victim] = expert, FETCHING
    pool.assigned_tag[victim] += 1
    pool.counters[PREFETCHES] += 1
    free = flights.slot.tolist().index(-1)
    event = int(pool.clock) + distance
    flights.slot[free], flights.event[free], flights.due_ns[free] = victim, event, due
    number = int(flights.number)
    values = (int(pool.assigned_tag[victim]), victim | expert << SLOT_BITS, event)
    words = [value << NUMBER_BITS | number & LOW_BITS for value in values]
    flights.requests[number % NUM_REQUESTS] = torch.tensor(words)
    flights.number.add_(1)


@triton.jit
def _start(expert, victim, event, due, free, number, pool, flights, expected_use):
    """Give the slot `victim` to a prefetch of `expert`, and ask for it."""
    old = tl.load(pool.owner + victim)
    tag = tl.load(pool.assigned_tag + victim) + 1
    tl.debug_barrier()
    if expected_use is not None:
        tl.store(expected_use.slot_coming + victim, tl.load(expected_use.coming + expert))
        tl.store(expected_use.slot_passed + victim, tl.load(expected_use.passed + expert))
    if old >= 0:
        tl.store(pool.slot_of + old, -1)
    tl.store(pool.owner + victim, expert)
    tl.store(pool.state + victim, _FETCHING)
    tl.store(pool.assigned_tag + victim, tag)
    tl.store(flights.slot + free, victim)
    tl.store(flights.event + free, event)
    tl.store(flights.due_ns + free, due)
    place = victim.to(tl.int64) | (expert.to(tl.int64) << _SLOT_BITS)
    entry = flights.requests + number % _NUM_REQUESTS * _REQUEST_WORDS
    low = number & _LOW_BITS
    tl.store(entry, (tag << _NUMBER_BITS) | low)
    tl.store(entry + 1, (place << _NUMBER_BITS) | low)
    tl.store(entry + 2, (event << _NUMBER_BITS) | low)


@triton.jit
def _both(names, hints):
    return tl.reshape(tl.join(names, hints), (2 * names.shape[0],))


@triton.jit
def request_prefetches(
    logits, ids, step, num_steps, wanted, slots, layer, pool, flights, expected_use, num_slots,
    E: tl.constexpr, K: tl.constexpr, NAMES: tl.constexpr, NUM_LAYERS: tl.constexpr,
    DISTANCES: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, RECORDED: tl.constexpr, HINTED: tl.constexpr,
):  # fmt: skip
    """`Ahead` at work. For a single program that runs beside others of its launch: it touches no
    slot that this layer uses, so that the kernels behind it may read those at once."""
    # A copy waits for this: what can be known at once is loaded before anything is decided.
    f, k = tl.arange(0, _NUM_FLIGHTS), tl.arange(0, BLOCK_K)
    slot, last_due = tl.load(flights.slot + f), tl.load(flights.due_ns + f)
    in_flight, per_layer = tl.load(flights.rules + _IN_FLIGHT), tl.load(flights.rules + _PER_LAYER)
    most_kept = tl.load(flights.rules + _MOST_KEPT)
    used = tl.load(slots + k, mask=k < K, other=-1)
    worthy = worthy_distances(flights, DISTANCES)
    layer_ns, copy_ns = tl.load(flights.rules + _LAYER_NS), tl.load(flights.rules + _COPY_NS)
    slack_ns, delay_ns = tl.load(flights.rules + _SLACK_NS), tl.load(flights.rules + _DELAY_NS)
    clock, number = tl.load(pool.clock), tl.load(flights.number)
    count = tl.load(pool.counters + _PREFETCHES)
    owner = tl.load(pool.owner + slot, mask=slot >= 0, other=-2)
    state = tl.load(pool.state + slot, mask=slot >= 0, other=_EMPTY)
    if in_flight > 0:
        now = agreed_now(flights)
        under_way = state == _FETCHING
        taken = tl.sum((slot >= 0).to(tl.int64) + (under_way.to(tl.int64) << 8), 0)
        room = tl.minimum(in_flight - (taken >> 8), per_layer)
        room = tl.minimum(room, most_kept - (taken & 0xFF))
        places = tl.arange(0, BLOCK_S)
        in_question = tl.where(room > 0, num_slots, 0)
        victims = victim_scores(pool, expected_use, (layer + 1) * E, in_question, places)
        seen = tl.minimum(NUM_LAYERS - 1 - layer, DISTANCES)
        name = named_experts(
            logits, ids, step, num_steps, layer, seen, E, NAMES, BLOCK_E, DISTANCES, BLOCK_N,
            RECORDED, NUM_LAYERS,
        )  # fmt: skip
        found = tl.load(pool.slot_of + name, mask=name >= 0, other=-1)
        coming = tl.max((name[:, None] == owner[None, :]).to(tl.int32), 1) > 0
        unknown = (name >= 0) & (found < 0)
        i = tl.arange(0, DISTANCES * BLOCK_N)
        d, rank = i // BLOCK_N, i % BLOCK_N
        kept = tl.where(unknown | ((name >= 0) & coming), name, -1)
        tl.store(
            flights.names + ((layer + 1 + d) * DISTANCES + d) * BLOCK_N + rank, kept, mask=d < seen
        )
        asked = tl.broadcast_to(worthy[:, None], (DISTANCES, BLOCK_N))
        asked = tl.reshape(asked, (DISTANCES * BLOCK_N,)) & unknown & (coming == 0)
        job = tl.where(asked, i, _NOBODY_K)
        if HINTED:
            hint = tl.load(flights.candidates + i)
            later = hint // E - layer - 1
            known = tl.load(pool.slot_of + hint, mask=(hint >= 0) & (later >= 0), other=-1)
            coming = tl.max((hint[:, None] == owner[None, :]).to(tl.int32), 1) > 0
            absent = (hint >= 0) & (later >= DISTANCES) & (known < 0) & (coming == 0)
            job = _both(job, tl.where(absent, DISTANCES * BLOCK_N + i, _NOBODY_K))
            name, found, d = _both(name, hint), _both(found, known), _both(d, later)
        if (room > 0) & (tl.min(job, 0) < _NOBODY_K):
            due = tl.maximum(now + delay_ns, tl.max(tl.where(under_way, last_due, 0), 0))
            latest = now + slack_ns + (d + 1) * layer_ns
            _start_jobs(
                job, name, found, d, latest, room, slot, due, copy_ns, clock, number, count, used,
                victims, places, pool, flights, expected_use,
            )  # fmt: skip
        judge_names(wanted, flights, layer, K, BLOCK_K, DISTANCES, BLOCK_N)


@triton.jit
def _start_jobs(
    job, name, found, d, latest, room, flight, due, copy_ns, clock, number, count, used, victims,
    places, pool, flights, expected_use,
):  # fmt: skip
    """Start up to `room` of the jobs, numbers below `_NOBODY` in the order of their urgency, each
    done by `latest`; the link is free at `due`."""
    f = tl.arange(0, _NUM_FLIGHTS)
    for _ in range(room):
        due += copy_ns
        able = tl.where(due <= latest, job, _NOBODY_K)
        best = tl.min(able, 0)
        victims, victim = poorest(victims, places, used, found, flight)
        if (best < _NOBODY_K) & (victim >= 0):
            free = tl.min(tl.where(flight < 0, f, _NUM_FLIGHTS), 0)
            both = (d.to(tl.int64) << 32) + name
            both = tl.sum(tl.where(able == best, both, 0), 0)
            event = clock + (both >> 32) + 1
            _start(both.to(tl.int32), victim, event, due, free, number, pool, flights, expected_use)
            number, count = number + 1, count + 1
            job = tl.where(job == best, _NOBODY_K, job)
            flight = tl.where(f == free, victim, flight)
    tl.debug_barrier()
    tl.atomic_xchg(flights.number, number, sem="release")  # whoever reads it sees the requests
    tl.store(pool.counters + _PREFETCHES, count)


def check_asking(asking: Asking, pool: PoolState, flights: Flights, device: torch.device) -> None:
    check_pool(pool, device)
    check_flights(flights, device)
    num_layers, distances, width = flights.names.shape
    if not 1 <= asking.num_names <= width:
        raise ValueError(f"num_names is {asking.num_names}, expected 1 to {width}")
    if asking.recorded is not None:
        shape = (-1, num_layers, distances, asking.num_names)
        check("ids", asking.recorded.ids, torch.int32, shape, device)
    if asking.expected_use is not None:
        check_expected_use(asking.expected_use, len(pool.slot_of), device)


def check_ahead(ahead: Ahead, pool: PoolState, flights: Flights) -> None:
    device = ahead.wanted.device
    check_asking(ahead.asking, pool, flights, device)
    check("slots", ahead.slots, torch.int32, (len(ahead.wanted),), device)
    num_layers, distances, _ = flights.names.shape
    seen = min(distances, num_layers - 1 - ahead.layer)
    if ahead.asking.recorded is None and seen > 0:
        check("logits", ahead.logits, FLOATS, (1, seen * ahead.asking.num_experts), device)


def asking_arguments(
    asking: Asking, top_k: int, pool: PoolState, flights: Flights
) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Those of `request_prefetches` that do not change from layer to layer: the recorded names, and
    from `num_slots` on."""
    num_layers, distances, width = flights.names.shape
    num_experts, num_names, recorded, hinted, _ = asking
    names = (None, None, 1) if recorded is None else (*recorded, len(recorded.ids))
    return names, (
        len(pool.owner),
        num_experts,
        top_k,
        num_names,
        num_layers,
        distances,
        triton.next_power_of_2(num_experts),
        triton.next_power_of_2(top_k),
        width,
        triton.next_power_of_2(len(pool.owner)),
        recorded is not None,
        hinted,
    )
