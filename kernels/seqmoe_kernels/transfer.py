"""Fetching missed experts: records of the host store are copied into their slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.checks import check, check_kernel_device
from seqmoe_kernels.clock import now_ns, now_ns_reference
from seqmoe_kernels.formats import NUM_MARKS, STALL_ENDED
from seqmoe_kernels.pdl import let_next_start, pdl_options, wait_for_inputs

# A few programs fill the link; more would only take multiprocessors from other kernels.
PROGRAMS_PER_RECORD = 16
BLOCK_WORDS = 4096  # int32 words that a program of 8 warps has in flight: 16 KiB

_STALL_ENDED = tl.constexpr(STALL_ENDED)


def fetch_reference(
    records: torch.Tensor,
    slots: torch.Tensor,
    miss_ids: torch.Tensor,
    miss_slots: torch.Tensor,
    num_misses: torch.Tensor,
    marks: torch.Tensor,
) -> None:
    count = int(num_misses)
    pairs = zip(miss_ids[:count].tolist(), miss_slots[:count].tolist(), strict=True)
    for expert, slot in pairs:
        if slot >= 0:
            slots[slot].copy_(records[expert])
    if count:
        marks[STALL_ENDED] = now_ns_reference()


@triton.jit
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
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    let_next_start(PDL)  # not before: the next kernel reads the resolved slots without waiting
    i = tl.program_id(1)
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


def fetch_triton(
    records: torch.Tensor,
    slots: torch.Tensor,
    miss_ids: torch.Tensor,
    miss_slots: torch.Tensor,
    num_misses: torch.Tensor,
    marks: torch.Tensor,
) -> None:
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
    if count > 0:
        _fetch_kernel[(PROGRAMS_PER_RECORD, count)](
            records.view(torch.int32),
            slots.view(torch.int32),
            miss_ids,
            miss_slots,
            num_misses,
            marks,
            record_bytes // 4,
            BLOCK_WORDS,
            PROGRAMS_PER_RECORD,
            num_warps=8,
            enable_fp_fusion=True,
            **pdl_options(slots.device),
        )


def fetch(
    records: torch.Tensor,
    slots: torch.Tensor,
    miss_ids: torch.Tensor,
    miss_slots: torch.Tensor,
    num_misses: torch.Tensor,
    marks: torch.Tensor,
) -> None:
    """Copy `records` (uint8 [N, R], host) of the first `num_misses` (int32 [1]) `miss_ids` (int32
    [n]) into the `miss_slots` (int32 [n]) of `slots` (uint8 [S, R]); a slot of -1 is left out.
    The end of the copies goes into `marks` (int64 [4]) as STALL_ENDED.

    With `slots` on a GPU, `records` must be pinned: a kernel reads them over the link.
    """
    run = fetch_triton if slots.is_cuda else fetch_reference
    run(records, slots, miss_ids, miss_slots, num_misses, marks)
