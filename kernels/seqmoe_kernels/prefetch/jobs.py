"""Starting prefetches: each gets a slot and a flight, and its request leaves for what copies."""

from __future__ import annotations

import triton
import triton.language as tl

from seqmoe_kernels.common.clock import now_ns_reference
from seqmoe_kernels.eviction.expected_use import ExpectedUse
from seqmoe_kernels.eviction.units import NEVER
from seqmoe_kernels.eviction.victims import poorest, victim_scores_reference
from seqmoe_kernels.prefetch.requests import Request, write_request, write_request_reference
from seqmoe_kernels.state import (
    COPY_NS,
    DELAY_NS,
    FETCHING,
    IN_FLIGHT,
    LAYER_NS,
    MOST_KEPT,
    NUM_FLIGHTS,
    PER_LAYER,
    PREFETCHES,
    SLACK_NS,
    Flights,
    PoolState,
)

NO_JOB = 1 << 20  # a number behind all jobs

_NO_JOB, _FETCHING = tl.constexpr(NO_JOB), tl.constexpr(FETCHING)
_NUM_FLIGHTS, _PREFETCHES = tl.constexpr(NUM_FLIGHTS), tl.constexpr(PREFETCHES)


def start_jobs_reference(
    jobs: list[tuple[int, int]],
    barred: list[int],
    first_to_come: int,
    pool: PoolState,
    flights: Flights,
    expected_use: ExpectedUse | None,
) -> None:
    rules, now = flights.rules.tolist(), now_ns_reference()
    taken = [slot for slot in flights.slot.tolist() if slot >= 0]
    under_way = [f for f in range(NUM_FLIGHTS) if _fetching(int(flights.slot[f]), pool)]
    room = min(rules[IN_FLIGHT] - len(under_way), rules[PER_LAYER], rules[MOST_KEPT] - len(taken))
    if room <= 0 or not jobs:
        return
    scores = victim_scores_reference(pool, expected_use, first_to_come)
    scores[barred + taken] = NEVER
    due = max([now + rules[DELAY_NS], *(int(flights.due_ns[f]) for f in under_way)])
    for _ in range(room):
        due += rules[COPY_NS]
        latest = due - now - rules[SLACK_NS]
        able = [job for job in jobs if latest <= job[0] * rules[LAYER_NS]]
        victim = int(scores.argmin())
        if not able or scores[victim] == NEVER:
            return
        distance, expert = able[0]
        jobs.remove(able[0])
        scores[victim] = NEVER
        _start_reference(expert, victim, distance, due, pool, flights, expected_use)


def _fetching(slot: int, pool: PoolState) -> bool:
    return slot >= 0 and int(pool.state[slot]) == FETCHING


def _start_reference(
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
    request = Request(int(pool.assigned_tag[victim]), victim, expert, event)
    write_request_reference(request, flights)


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
    write_request(flights, number, tag, victim, expert, event)


@triton.jit
def start_jobs(
    job, expert, found, d, latest, room, flight, due, copy_ns, clock, number, count, used, victims,
    places, pool, flights, expected_use, ON_HOST: tl.constexpr,
):  # fmt: skip
    """Start up to `room` of the jobs, numbers below `NO_JOB` in the order of their urgency, each
    done by `latest`; the link is free at `due`."""
    f = tl.arange(0, _NUM_FLIGHTS)
    for _ in range(room):
        due += copy_ns
        able = tl.where(due <= latest, job, _NO_JOB)
        best = tl.min(able, 0)
        victims, victim = poorest(victims, places, used, found, flight)
        if (best < _NO_JOB) & (victim >= 0):
            free = tl.min(tl.where(flight < 0, f, _NUM_FLIGHTS), 0)
            both = (d.to(tl.int64) << 32) + expert
            both = tl.sum(tl.where(able == best, both, 0), 0)
            event = clock + (both >> 32) + 1
            _start(both.to(tl.int32), victim, event, due, free, number, pool, flights, expected_use)
            number, count = number + 1, count + 1
            job = tl.where(job == best, _NO_JOB, job)
            flight = tl.where(f == free, victim, flight)
    tl.debug_barrier()
    # A kernel that reads the number sees the requests. A thread reads those themselves; they must
    # be on their way to the host, however long this kernel goes on.
    if ON_HOST:
        tl.atomic_xchg(flights.number, number, sem="release", scope="sys")
    else:
        tl.atomic_xchg(flights.number, number, sem="release")
    tl.store(pool.counters + _PREFETCHES, count)
