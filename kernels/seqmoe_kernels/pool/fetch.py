"""Fetching missed experts: records of the host store are copied into their slots. When there are
prefetches, the same launch asks for those of the next layers, or lets the handover ask."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check, check_kernel_device
from seqmoe_kernels.common.clock import now_ns, now_ns_reference
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.pool.landing import check_flights
from seqmoe_kernels.pool.lock import Handover, check_handover, free_lock, free_lock_reference
from seqmoe_kernels.prefetch.lookahead import Ahead
from seqmoe_kernels.prefetch.schedule import (
    asking_arguments,
    check_ahead,
    request_prefetches,
    request_reference,
)
from seqmoe_kernels.state import NUM_MARKS, STALL_ENDED, Flights, PoolState

# A few programs fill the link; more would only take multiprocessors from other kernels.
PROGRAMS_PER_RECORD = 16
BLOCK_WORDS = 4096  # int32 words that a program of 8 warps has in flight: 16 KiB

_STALL_ENDED = tl.constexpr(STALL_ENDED)


class Prefetching(NamedTuple):
    """What a fetch must know of prefetches. It asks for those of `ahead`, or opens the gate for the
    `handover` to ask behind `layer`, or neither."""

    pool: PoolState
    flights: Flights
    ahead: Ahead | None = None
    handover: Handover | None = None
    layer: int = 0


def fetch_reference(
    records: torch.Tensor,
    slots: torch.Tensor,
    miss_ids: torch.Tensor,
    miss_slots: torch.Tensor,
    num_misses: torch.Tensor,
    marks: torch.Tensor,
    prefetching: Prefetching | None = None,
) -> None:
    count = int(num_misses)
    pairs = zip(miss_ids[:count].tolist(), miss_slots[:count].tolist(), strict=True)
    for expert, slot in pairs:
        if slot >= 0:
            slots[slot].copy_(records[expert])
    if count:
        marks[STALL_ENDED] = now_ns_reference()
    if prefetching is None:
        return
    pool, flights, ahead, handover, layer = prefetching
    if handover is not None:
        free_lock_reference(handover, layer)
    if count:
        flights.control.copy_(pool.clock * 2)
    if ahead is not None:
        request_reference(ahead, pool, flights)


# Compiled once for all layers, whatever their number and where their experts are noted.
@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["wanted"])
def _fetch_kernel(
    records,
    slots,
    miss_ids,
    miss_slots,
    num_misses,
    marks,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PREFETCH: tl.constexpr,
    AHEAD: tl.constexpr,
    BESIDE: tl.constexpr,
    handover,
    pool,
    flights,
    expected_use,
    logits,
    ids,
    step,
    num_steps,
    wanted,
    used,
    layer,
    num_slots,
    E: tl.constexpr,
    K: tl.constexpr,
    NAMES: tl.constexpr,
    LAYERS: tl.constexpr,
    DISTANCES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    RECORDED: tl.constexpr,
    HINTED: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    i = tl.program_id(1)
    if BESIDE:  # noqa: SIM102 (one condition is the compiler's)
        if (i == 0) & (tl.program_id(0) == 0):
            free_lock(handover.lock, layer)
    let_next_start(PDL)  # not before: the next kernel reads the resolved slots without waiting
    if AHEAD:  # noqa: SIM102 (one condition is the compiler's)
        # A row beyond those of misses; it touches no slot that this layer uses.
        if (i == tl.num_programs(1) - 1) & (tl.program_id(0) == 0):
            request_prefetches(
                logits, ids, step, num_steps, wanted, used, layer, pool, flights, expected_use,
                num_slots, E, K, NAMES, LAYERS, DISTANCES, BLOCK_E, BLOCK_K, BLOCK_N, BLOCK_S,
                RECORDED, HINTED,
            )  # fmt: skip
    if i < tl.load(num_misses):
        slot = tl.load(miss_slots + i).to(tl.int64)
        if slot >= 0:
            source = records + tl.load(miss_ids + i).to(tl.int64) * WORDS
            target = slots + slot * WORDS
            for start in range(tl.program_id(0) * BLOCK, WORDS, PROGRAMS * BLOCK):
                at = start + tl.arange(0, BLOCK)
                words = tl.load(source + at, mask=at < WORDS, cache_modifier=".cg")
                tl.store(target + at, words, mask=at < WORDS)
        tl.debug_barrier()
        tl.atomic_max(marks + _STALL_ENDED, now_ns())  # the latest program tells
        if PREFETCH:
            arrived = tl.atomic_add(flights.arrived, 1) + 1
            if arrived == tl.load(num_misses) * PROGRAMS:  # the last one lets copies go on
                tl.store(flights.arrived, 0)
                tl.store(flights.control, tl.load(pool.clock) * 2)


def _of_prefetching(prefetching: Prefetching | None) -> tuple[object, ...]:
    """The arguments of `_fetch_kernel` from `handover` on."""
    if prefetching is None:
        return *(None,) * 7, 1, None, None, 0, 1, *(1,) * 9, False, False
    pool, flights, ahead, handover, layer = prefetching
    if ahead is None:
        return (
            *(handover, pool, flights, *(None,) * 4, 1, None, None, layer, 1, *(1,) * 9),
            *(False, False),
        )
    top_k, asking = len(ahead.wanted), ahead.asking
    names, sizes = asking_arguments(asking, top_k, prefetching.pool, prefetching.flights)
    event = (ahead.wanted, ahead.slots, ahead.layer)
    return None, pool, flights, asking.expected_use, ahead.logits, *names, *event, *sizes


@verb(fetch_reference)
def fetch(
    records: torch.Tensor,
    slots: torch.Tensor,
    miss_ids: torch.Tensor,
    miss_slots: torch.Tensor,
    num_misses: torch.Tensor,
    marks: torch.Tensor,
    prefetching: Prefetching | None = None,
) -> None:
    """Copy `records` (uint8 [N, R], host) of the first `num_misses` (int32 [1]) `miss_ids` (int32
    [n]) into the `miss_slots` (int32 [n]) of `slots` (uint8 [S, R]); a slot of -1 is left out.
    The end of the copies goes into `marks` (int64 [4]) as STALL_ENDED.

    With `slots` on a GPU, `records` must be pinned: a kernel reads them over the link. With
    `prefetching`, who copies is told that the misses are served, and what is named ahead is asked
    for.
    """
    check_kernel_device(slots)
    record_bytes = slots.shape[-1]
    if record_bytes % 16:
        raise ValueError(f"a record has {record_bytes} bytes, expected a multiple of 16")
    check("slots", slots, torch.uint8, (-1, record_bytes), slots.device)
    check("records", records, torch.uint8, (-1, record_bytes), records.device)
    if slots.is_cuda and not records.is_cuda and not records.is_pinned():
        raise ValueError("records is in pageable memory, expected pinned memory")
    count = miss_ids.shape[0]
    check("miss_ids", miss_ids, torch.int32, (count,), slots.device)
    check("miss_slots", miss_slots, torch.int32, (count,), slots.device)
    check("num_misses", num_misses, torch.int32, (1,), slots.device)
    check("marks", marks, torch.int64, (NUM_MARKS,), slots.device)
    ahead = None if prefetching is None else prefetching.ahead
    if prefetching is not None:
        check_flights(prefetching.flights, slots.device)
        if ahead is not None:
            check_ahead(ahead, prefetching.pool, prefetching.flights)
        if prefetching.handover is not None:
            check_handover(prefetching.handover, slots.device)
    if count > 0:
        rows = count + (ahead is not None)
        _fetch_kernel[(PROGRAMS_PER_RECORD, rows)](
            records.view(torch.int32),
            slots.view(torch.int32),
            miss_ids,
            miss_slots,
            num_misses,
            marks,
            record_bytes // 4,
            BLOCK_WORDS,
            PROGRAMS_PER_RECORD,
            prefetching is not None,
            ahead is not None,
            prefetching is not None and prefetching.handover is not None,
            *_of_prefetching(prefetching),
            num_warps=8,
            enable_fp_fusion=True,
            **pdl_options(slots.device),
        )
