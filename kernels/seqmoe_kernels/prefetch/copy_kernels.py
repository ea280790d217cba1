"""Two kernels that run beside those of a step, from behind its first layer to its end.

`schedule_prefetches` asks for prefetches behind every layer, `copy_prefetches` copies
them. Neither is on the way of the kernels that compute. A copy stands still while misses are
fetched, so that it delays none, and is cut short once the event that it is for is over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check, check_kernel_device
from seqmoe_kernels.common.clock import now_ns
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.pool.landing import check_flights
from seqmoe_kernels.pool.lock import (
    COPY_PROGRAMS,
    INSIDE,
    OPEN,
    Handover,
    check_handover,
    layer_at,
    layer_at_reference,
    leave_lock,
    try_lock,
)
from seqmoe_kernels.pool.resolve import check_pool
from seqmoe_kernels.pool.step_ring import NUMBER_BITS
from seqmoe_kernels.prefetch.lookahead import Ahead, Asking
from seqmoe_kernels.prefetch.schedule import (
    SLOT_BITS,
    asking_arguments,
    check_asking,
    read_request,
    request_prefetches,
    request_reference,
)
from seqmoe_kernels.state import (
    CUT_BYTES,
    GAVE_UP,
    NUM_REQUESTS,
    REQUEST_WORDS,
    Flights,
    PoolState,
)

BLOCK_WORDS = 4096  # int32 words that a program of 8 warps has in flight: 16 KiB
# A step that was broken off on the host never gets to its last layer, and the host may wait for all
# that runs before it goes on: give up then. The interpreter, where nothing happens meanwhile, looks
# twice.
LIMIT_NS = 10**8
_LOOKS = tl.constexpr(2 if triton.knobs.runtime.interpret else 1 << 24)
_GLANCES = tl.constexpr(1 if triton.knobs.runtime.interpret else 8)  # for work, to one at the gate

_CUT_BYTES, _GAVE_UP = tl.constexpr(CUT_BYTES), tl.constexpr(GAVE_UP)
_NUM_REQUESTS, _REQUEST_WORDS = tl.constexpr(NUM_REQUESTS), tl.constexpr(REQUEST_WORDS)
_NUMBER_BITS, _SLOT_BITS = tl.constexpr(NUMBER_BITS), tl.constexpr(SLOT_BITS)
_SLOT_MASK = tl.constexpr((1 << SLOT_BITS) - 1)
_OPEN, _CUT = tl.constexpr(OPEN), tl.constexpr(1 << 16)


def ask_reference(asking: Asking, pool: PoolState, flights: Flights, handover: Handover) -> None:
    """Behind the last event, if that was not asked behind."""
    layer, top_k = layer_at_reference(handover), len(handover.slots)
    seen = min(flights.names.shape[1], len(flights.names) - 1 - layer)
    if int(handover.lock) & OPEN and seen > 0:
        logits = handover.logits[None, : seen * asking.num_experts]
        wanted = handover.used[layer * top_k :][:top_k]
        ahead = Ahead(layer, logits, wanted, handover.slots, asking)
        request_reference(ahead, pool, flights)
        handover.lock.bitwise_and_(~(OPEN | INSIDE))


@triton.jit
def _ask_kernel(
    pool, flights, handover, limit_ns, expected_use, ids, step, num_steps, num_slots,
    E: tl.constexpr,
    K: tl.constexpr, NAMES: tl.constexpr, LAYERS: tl.constexpr, DISTANCES: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    RECORDED: tl.constexpr, HINTED: tl.constexpr,
):  # fmt: skip
    until = now_ns() + limit_ns
    looks, gave_up = tl.full((), _LOOKS, tl.int32), tl.full((), 1, tl.int64)
    while looks > 0:
        gate = tl.atomic_or(handover.lock, 0, sem="acquire")
        layer = layer_at(gate)
        if layer == LAYERS - 1:
            looks, gave_up = looks * 0, gave_up * 0
        else:
            if (gate & _OPEN) != 0:  # noqa: SIM102 (one condition is the compiler's)
                if try_lock(handover.lock, gate):
                    request_prefetches(
                        handover.logits, ids, step, num_steps, handover.used + layer * K,
                        handover.slots, layer, pool, flights, expected_use, num_slots, E, K, NAMES,
                        LAYERS, DISTANCES, BLOCK_E, BLOCK_K, BLOCK_N, BLOCK_S, RECORDED, HINTED,
                    )  # fmt: skip
                    leave_lock(handover.lock)
            looks = tl.where(now_ns() < until, looks - 1, 0)
    tl.atomic_add(pool.counters + _GAVE_UP, gave_up)


@verb(ask_reference)
def schedule_prefetches(
    asking: Asking, pool: PoolState, flights: Flights, handover: Handover
) -> None:
    """Ask for prefetches behind every layer that is still to come in this step but the last one. To
    be queued beside the kernels of the step, behind those of its first layer."""
    device = pool.clock.device
    check_kernel_device(pool.clock)
    check_asking(asking, pool, flights, device)
    check_handover(handover, device)
    names, sizes = asking_arguments(asking, len(handover.slots), pool, flights)
    _ask_kernel[(1,)](
        pool,
        flights,
        handover,
        LIMIT_NS,
        asking.expected_use,
        *names,
        *sizes,
        num_warps=8,
        enable_fp_fusion=True,
    )


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
    records, slots, pool, flights, handover, limit_ns, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
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
                gate = tl.atomic_or(handover.lock, 0, sem="acquire")
                last = tl.atomic_or(flights.number, 0, sem="acquire")  # then it has them all
                over = (layer_at(gate) == LAYERS - 1) & (number == last)
                looks = tl.where(over, 0, looks)
    tl.debug_barrier()
    tl.store(handover.served + p, number)


@triton.jit
def _copy(
    records, slots, pool, flights, handover, number, until, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """This program's part of a copy; the last one lands the tag."""
    entry = flights.requests + number % _NUM_REQUESTS * _REQUEST_WORDS
    tag, place, event = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    control = tl.atomic_or(flights.control, 0, sem="relaxed")  # while those come
    tag, place, event = tag >> _NUMBER_BITS, place >> _NUMBER_BITS, event >> _NUMBER_BITS
    slot = place & _SLOT_MASK
    source, target = records + (place >> _SLOT_BITS) * WORDS, slots + slot * WORDS
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
    check_kernel_device(slots)
    check_pool(pool, slots.device)
    check_flights(flights, slots.device)
    check_handover(handover, slots.device)
    size = slots.shape[-1]
    if size % 16:
        raise ValueError(f"a record has {size} bytes, expected a multiple of 16")
    check("slots", slots, torch.uint8, (len(pool.owner), size), slots.device)
    check("records", records, torch.uint8, (len(pool.slot_of), size), records.device)
    if slots.is_cuda and not records.is_cuda and not records.is_pinned():
        raise ValueError("records is in pageable memory, expected pinned memory")
    _copy_kernel[(COPY_PROGRAMS,)](
        records.view(torch.int32),
        slots.view(torch.int32),
        pool,
        flights,
        handover,
        LIMIT_NS,
        size // 4,
        BLOCK_WORDS,
        COPY_PROGRAMS,
        len(flights.names),
        num_warps=8,
        enable_fp_fusion=True,
    )
