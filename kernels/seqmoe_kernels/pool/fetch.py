"""Fetching missed experts: records of the host store are copied into their slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check, check_link
from seqmoe_kernels.common.clock import now_ns, now_ns_reference
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.pool.resolve import Resolved
from seqmoe_kernels.state import NUM_MARKS, STALL_ENDED

# A few programs fill the link; more would only take multiprocessors from other kernels.
PROGRAMS_PER_RECORD = 16
BLOCK_WORDS = 4096  # int32 words that a program of 8 warps has in flight: 16 KiB

_STALL_ENDED = tl.constexpr(STALL_ENDED)


class AllCopied(NamedTuple):
    """How a fetch tells that its copies are done; without a miss it tells nothing."""

    word: torch.Tensor  # int64 [1], set to twice the clock
    clock: torch.Tensor  # int64 [1]
    arrived: torch.Tensor  # int32 [1], programs that are done; 0 between launches


class Begun(NamedTuple):
    """How a fetch tells that it has begun, so that all kernels before it have ended."""

    word: torch.Tensor  # int32 [1]
    value: int  # that it is set to


class Signals(NamedTuple):
    """Words that a fetch sets for what runs beside it."""

    all_copied: AllCopied
    begun: Begun | None = None


def fetch_reference(
    records: torch.Tensor,
    slots: torch.Tensor,
    resolved: Resolved,
    marks: torch.Tensor,
    signals: Signals | None = None,
) -> None:
    if signals is not None and signals.begun is not None:
        signals.begun.word.fill_(signals.begun.value)
    count = int(resolved.num_misses)
    misses = resolved.miss_ids[:count].tolist(), resolved.miss_slots[:count].tolist()
    for expert, slot in zip(*misses, strict=True):
        if slot >= 0:
            slots[slot].copy_(records[expert])
    if count:
        marks[STALL_ENDED] = now_ns_reference()
    if count and signals is not None:
        signals.all_copied.word.copy_(signals.all_copied.clock * 2)


# Compiled once for all layers, whatever the word of each begins with.
@triton.jit(do_not_specialize=["begun_value"])
def _fetch_kernel(
    records,
    slots,
    resolved,
    marks,
    all_copied,
    begun,
    begun_value,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [PROGRAMS, n]. records int32 [N, WORDS] in host memory, slots int32 [S, WORDS]; of
    `resolved` the misses, [n]; marks int64 [4]; all_copied `AllCopied` or None; begun int32 [1] or
    None."""
    wait_for_inputs(PDL)
    i = tl.program_id(1)
    if begun is not None:  # noqa: SIM102 (one condition is the compiler's)
        if (i == 0) & (tl.program_id(0) == 0):
            # Kernels before this one have ended, so that nothing has to be released.
            tl.atomic_xchg(begun, begun_value, sem="relaxed")
    let_next_start(PDL)  # not before: the next kernel reads the resolved slots without waiting
    if i < tl.load(resolved.num_misses):
        slot = tl.load(resolved.miss_slots + i).to(tl.int64)
        if slot >= 0:
            source = records + tl.load(resolved.miss_ids + i).to(tl.int64) * WORDS
            target = slots + slot * WORDS
            for start in range(tl.program_id(0) * BLOCK, WORDS, PROGRAMS * BLOCK):
                at = start + tl.arange(0, BLOCK)
                words = tl.load(source + at, mask=at < WORDS, cache_modifier=".cg")
                tl.store(target + at, words, mask=at < WORDS)
        tl.debug_barrier()
        tl.atomic_max(marks + _STALL_ENDED, now_ns())  # the latest program tells
        if all_copied is not None:
            arrived = tl.atomic_add(all_copied.arrived, 1) + 1
            if arrived == tl.load(resolved.num_misses) * PROGRAMS:  # the last one
                tl.store(all_copied.arrived, 0)
                tl.store(all_copied.word, tl.load(all_copied.clock) * 2)


@verb(fetch_reference)
def fetch(
    records: torch.Tensor,
    slots: torch.Tensor,
    resolved: Resolved,
    marks: torch.Tensor,
    signals: Signals | None = None,
) -> None:
    """Copy `records` (uint8 [N, R], host) of the misses of `resolved` into their slots among
    `slots` (uint8 [S, R]); a slot of -1 is left out. The end of the copies goes into `marks` (int64
    [4]) as STALL_ENDED, and what runs beside is told by `signals`.

    With `slots` on a GPU, `records` must be pinned: a kernel reads them over the link.
    """
    check_link(records, slots)
    count, device = len(resolved.miss_ids), slots.device
    check("miss_ids", resolved.miss_ids, torch.int32, (count,), device)
    check("miss_slots", resolved.miss_slots, torch.int32, (count,), device)
    check("num_misses", resolved.num_misses, torch.int32, (1,), device)
    check("marks", marks, torch.int64, (NUM_MARKS,), device)
    all_copied, begun = (None, None) if signals is None else signals
    if all_copied is not None:
        check("all_copied", all_copied.word, torch.int64, (1,), all_copied.word.device)
        check("clock", all_copied.clock, torch.int64, (1,), device)
        check("arrived", all_copied.arrived, torch.int32, (1,), device)
    if begun is not None:
        check("begun", begun.word, torch.int32, (1,), device)
    if count > 0:
        _fetch_kernel[(PROGRAMS_PER_RECORD, count)](
            records=records.view(torch.int32),
            slots=slots.view(torch.int32),
            resolved=resolved,
            marks=marks,
            all_copied=all_copied,
            begun=None if begun is None else begun.word,
            begun_value=0 if begun is None else begun.value,
            WORDS=slots.shape[1] // 4,
            BLOCK=BLOCK_WORDS,
            PROGRAMS=PROGRAMS_PER_RECORD,
            num_warps=8,
            enable_fp_fusion=True,
            **pdl_options(device),
        )
