"""Copying prefetches by a kernel that runs beside those of a step, from behind its first layer to
its end. It is not on the way of the kernels that compute: a copy stands still while misses are
fetched, so that it delays none, and is cut short once the event that it is for is over."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check_link
from seqmoe_kernels.common.clock import now_ns
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.pool import lock
from seqmoe_kernels.pool.fetch import BLOCK_WORDS
from seqmoe_kernels.pool.landing import check_flights
from seqmoe_kernels.pool.lock import COPY_PROGRAMS, Handover, check_handover, layer_at
from seqmoe_kernels.pool.resolve import check_pool
from seqmoe_kernels.prefetch.requests import load_request, read_request
from seqmoe_kernels.prefetch.schedule import LOOKS
from seqmoe_kernels.state import CUT_BYTES, NUM_REQUESTS, Flights, PoolState

_LOOKS = tl.constexpr(LOOKS)
_GLANCES = tl.constexpr(1 if triton.knobs.runtime.interpret else 8)  # for work, to one at the lock
_CUT_BYTES, _NUM_REQUESTS = tl.constexpr(CUT_BYTES), tl.constexpr(NUM_REQUESTS)
_CUT = tl.constexpr(1 << 16)


def copy_reference(
    records: torch.Tensor,
    slots: torch.Tensor,
    pool: PoolState,
    flights: Flights,
    handover: Handover,
) -> None:
    """All that is asked for now, while no misses are fetched."""
    clock, last = int(flights.control) >> 1, int(flights.number)
    for number in range(int(handover.served[0]), last):
        request = read_request(flights.requests, number)
        if request is None:
            raise AssertionError(f"request {number} has a number and is not there")
        is_over = clock >= request.event
        if not is_over:
            slots[request.slot].copy_(records[request.expert])
        pool.landed_tag[request.slot] = -request.tag if is_over else request.tag
    handover.served.fill_(last)


@triton.jit
def _copy_kernel(
    records,
    slots,
    pool,
    flights,
    handover,
    limit_ns,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
):
    """Grid [PROGRAMS]. records int32 [N, WORDS] in host memory, slots int32 [S, WORDS]."""
    p = tl.program_id(0)
    until = now_ns() + limit_ns
    number = tl.load(handover.served + p)
    looks = tl.full((), _LOOKS, tl.int32)
    while looks > 0:
        if number < tl.atomic_or(flights.number, 0, sem="acquire"):
            _copy(records, slots, pool, flights, handover, number, until, WORDS, BLOCK, PROGRAMS)
            number += 1
        else:
            looks = tl.where(now_ns() < until, looks - 1, 0)
            if looks % _GLANCES == 0:
                word = tl.atomic_or(handover.lock, 0, sem="acquire")
                last = tl.atomic_or(flights.number, 0, sem="acquire")  # then it has them all
                over = (layer_at(word) == NUM_LAYERS - 1) & (number == last)
                looks = tl.where(over, 0, looks)
    tl.debug_barrier()
    tl.store(handover.served + p, number)


@triton.jit
def _copy(
    records, slots, pool, flights, handover, number, until, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """This program's part of a copy; the last one lands the tag."""
    tag, slot, expert, event, control = load_request(flights, number)
    source, target = records + expert * WORDS, slots + slot * WORDS
    first = tl.program_id(0) * BLOCK
    start = first
    while (start < WORDS) & ((control >> 1) < event):
        if (control & 1) == 0:
            at = start + tl.arange(0, BLOCK)
            words = tl.load(source + at, mask=at < WORDS, cache_modifier=".cg")
            control = tl.atomic_or(flights.control, 0, sem="relaxed")  # while the words come
            tl.store(target + at, words, mask=at < WORDS)
            start += PROGRAMS * BLOCK
        else:
            control = tl.atomic_or(flights.control, 0, sem="relaxed")
            if now_ns() > until:
                control = event << 1
    cut = (start < WORDS).to(tl.int32)
    if cut > 0:
        moved = ((start - first) // PROGRAMS * 4).to(tl.int64)
        tl.atomic_add(pool.counters + _CUT_BYTES, moved)
    tl.debug_barrier()
    done = handover.arrived + number % _NUM_REQUESTS
    arrived = tl.atomic_add(done, 1 + cut * _CUT, sem="acq_rel")
    if arrived % _CUT == PROGRAMS - 1:
        tl.atomic_xchg(done, 0, sem="relaxed")
        landed = tl.where(arrived // _CUT + cut == 0, tag, -tag)
        tl.atomic_xchg(pool.landed_tag + slot, landed, sem="release")


@verb(copy_reference)
def copy_prefetches(
    records: torch.Tensor,
    slots: torch.Tensor,
    pool: PoolState,
    flights: Flights,
    handover: Handover,
) -> None:
    """Copy what is asked for, from `records` (uint8 [N, R], host, pinned) into `slots` (uint8
    [S, R]), and land the tag behind it, until the last layer has its experts and all requests are
    served. Minus the tag lands when the event is over before its copy is whole. To be queued beside
    the kernels of a step, behind those of its first layer."""
    check_pool(pool, slots.device)
    check_flights(flights, slots.device)
    check_handover(handover, slots.device)
    check_link(records, slots)
    expected, found = (len(pool.slot_of), len(pool.owner)), (len(records), len(slots))
    if found != expected:
        raise ValueError(f"{found} records and slots, expected {expected} as in the pool")
    _copy_kernel[(COPY_PROGRAMS,)](
        records=records.view(torch.int32),
        slots=slots.view(torch.int32),
        pool=pool,
        flights=flights,
        handover=handover,
        limit_ns=lock.LIMIT_NS,
        WORDS=slots.shape[1] // 4,
        BLOCK=BLOCK_WORDS,
        PROGRAMS=COPY_PROGRAMS,
        NUM_LAYERS=len(flights.predicted),
        num_warps=8,
        enable_fp_fusion=True,
    )
