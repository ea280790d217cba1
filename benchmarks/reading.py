"""A kernel that reads what the experts' first kernel reads, and does nothing with it: how fast so
short a kernel can be."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels import ExpertFormat
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs

ROWS, NUM_WARPS = 8, 2


@triton.jit
def _read_kernel(
    words,
    pair_slots,
    sums,
    slot_words,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    slot = tl.load(pair_slots + tl.program_id(1), cache_modifier=".cg").to(tl.int64)
    let_next_start(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = words + slot * slot_words + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tile = tl.load(at, cache_modifier=".cg")
    tl.debug_barrier()
    late = tl.load(pair_slots + tl.program_id(1))  # no sum begins before all is on its way
    total = tl.sum(tile ^ late, 1)
    tl.store(sums + tl.program_id(1) * tl.num_programs(0) * ROWS + row, total)
    wait_for_inputs(PDL)


def read_gate_up(slots: torch.Tensor, pair_slots: torch.Tensor, fmt: ExpertFormat) -> torch.Tensor:
    """Sums of each row of gate and up of the experts in `pair_slots` [K], as int32 words that are
    combined with the number of the slot."""
    width, rows = fmt.gate.row_bytes // 4, 2 * fmt.inter
    sums = torch.empty((len(pair_slots), rows), dtype=torch.int32, device=slots.device)
    words = slots.view(torch.int32)
    _read_kernel[(rows // ROWS, len(pair_slots))](
        words,
        pair_slots,
        sums,
        words.stride(0),
        width,
        ROWS,
        num_warps=NUM_WARPS,
        **pdl_options(slots.device),
    )
    return sums
