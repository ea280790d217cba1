"""The experts of one token, from the records that lie in slots: two matrix-vector kernels.

The first multiplies with gate and up of all chosen experts and activates; the second multiplies
with down, adds up the experts with their weights, and adds the residual stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.checks import FLOATS, check, check_kernel_device
from seqmoe_kernels.expert_pairs import check_slots, expert_pairs
from seqmoe_kernels.formats import ExpertFormat
from seqmoe_kernels.fp8 import BLOCK, kernel_codes
from seqmoe_kernels.lookup import Resolved
from seqmoe_kernels.mixture import combine_reference
from seqmoe_kernels.pdl import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.row_products import block_row, chunk_sums, dot_rows, load_tile, unbiased
from seqmoe_kernels.tiling import Tiling, narrow_tiling, tiling_for

_BLOCK = tl.constexpr(BLOCK)


def expert_mlp_reference(
    x: torch.Tensor,
    h: torch.Tensor,
    slots: torch.Tensor,
    resolved: Resolved,
    weights: torch.Tensor,
    fmt: ExpertFormat,
) -> torch.Tensor:
    pairs = torch.empty((1, len(weights), fmt.hidden), device=x.device)
    expert_pairs(h, slots, resolved.slots.unsqueeze(0), fmt, pairs)
    return x + combine_reference(pairs, weights.unsqueeze(0), x.dtype)


@triton.jit
def _gate_up_kernel(
    h,
    weights,
    scales,
    pair_slots,
    num_misses,
    act,
    slot_weights,
    slot_scales,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    GATE: tl.constexpr,
    UP: tl.constexpr,
    GATE_SCALE: tl.constexpr,
    UP_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    # The fetch before this kernel lets it start when the slots are known. Without a miss they hold
    # what they should, and the first tile comes while the fetch ends.
    pair = tl.program_id(1)
    slot = tl.maximum(tl.load(pair_slots + pair, cache_modifier=".cg"), 0).to(tl.int64)
    first = tl.program_id(0) * ROWS
    lane = tl.arange(0, 2 * ROWS)  # rows of gate and up in turn
    row = first + lane // 2
    starts = slot * slot_weights + GATE + lane % 2 * (UP - GATE) + row * H
    column = tl.arange(0, BLOCK_K)
    ahead = load_tile(weights, starts, row < I, column, H)
    wait_for_inputs(PDL)
    let_next_start(PDL)  # not before: the next kernel reads slots without waiting for this one
    if PDL:  # noqa: SIM102
        if tl.load(num_misses) > 0:  # (one condition is the compiler's)
            ahead = load_tile(weights, starts, row < I, column, H)
    of_slot = scales + slot * slot_scales + block_row(first, H)
    of_gate, of_up = of_slot + GATE_SCALE, of_slot + UP_SCALE
    both = dot_rows(
        ahead,
        weights,
        starts,
        row < I,
        h,
        h,
        0.0,
        of_gate,
        of_up,
        H,
        BLOCK_K,
        TILES,
        False,
        True,
    )
    gate, up = tl.split(tl.reshape(both, (ROWS, 2)))
    value = gate / (1 + tl.exp(-gate)) * up
    row = first + tl.arange(0, ROWS)
    tl.store(act + pair * I + row, value.to(act.dtype.element_ty), mask=row < I)


@triton.jit
def _down_tile(
    weights,
    pair_slots,
    row,
    chunk,
    slot_weights,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    DOWN: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Chunks of rows [ROWS, chunks, CHUNK], and the slot that each chunk lies in; `chunk` [chunks]
    counts columns through all experts, LENGTH of them."""
    inside = chunk < LENGTH
    slot = tl.maximum(
        tl.load(pair_slots + chunk // I, mask=inside, other=0, cache_modifier=".cg"), 0
    ).to(tl.int64)
    start = slot * slot_weights + DOWN + chunk % I
    at = start[None, :, None] + (row * I)[:, None, None] + tl.arange(0, CHUNK)[None, None, :]
    at = tl.max_contiguous(tl.multiple_of(at, [1, 1, CHUNK]), [1, 1, CHUNK])
    mask = (row < H)[:, None, None] & inside[None, :, None]
    return tl.load(weights + at, mask=mask, other=0.0, cache_modifier=".cg"), slot


@triton.jit
def _down_kernel(
    act,
    weights,
    scales,
    pair_slots,
    pair_weights,
    residual,
    out,
    slot_weights,
    slot_scales,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    DOWN: tl.constexpr,
    DOWN_SCALE: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # One product of rows as long as all experts together: activations [K * I] lie in a row, the
    # weights of a row lie in K slots.
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    dtype: tl.constexpr = weights.dtype.element_ty
    CHUNK: tl.constexpr = 128 // dtype.primitive_bitwidth
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK
    LENGTH: tl.constexpr = TOP_K * I
    of_rows = scales + DOWN_SCALE + block_row(first, I)
    first_chunk = tl.arange(0, CHUNKS) * CHUNK
    total = tl.zeros((ROWS, CHUNKS), tl.float32)
    # Up to three tiles are on their way, from slots that hold what they should: `_gate_up_kernel`
    # lets this one start after the fetch.
    tile_0, slot_0 = _down_tile(
        weights, pair_slots, row, first_chunk, slot_weights, H, I, DOWN, LENGTH, CHUNK
    )
    tile_1, slot_1, tile_2, slot_2 = tile_0, slot_0, tile_0, slot_0
    if BLOCK_K < LENGTH:
        tile_1, slot_1 = _down_tile(
            weights, pair_slots, row, first_chunk + BLOCK_K, slot_weights, H, I, DOWN, LENGTH, CHUNK
        )
    wait_for_inputs(PDL)
    let_next_start(PDL)
    for start in tl.static_range(0, LENGTH, BLOCK_K):
        chunk = first_chunk + start
        if start + 2 * BLOCK_K < LENGTH:
            tile_2, slot_2 = _down_tile(
                weights,
                pair_slots,
                row,
                chunk + 2 * BLOCK_K,
                slot_weights,
                H,
                I,
                DOWN,
                LENGTH,
                CHUNK,
            )
        inside = chunk < LENGTH
        value = tl.load(
            act + chunk[:, None] + tl.arange(0, CHUNK)[None, :], mask=inside[:, None], other=0.0
        ).to(tl.float32)
        factor = tl.load(pair_weights + chunk // I, mask=inside, other=0.0)
        if dtype.primitive_bitwidth == 8:
            factor *= tl.load(of_rows + slot_0 * slot_scales + chunk % I // _BLOCK)
        total += chunk_sums(tile_0, value) * unbiased(factor, dtype)[None, :]
        tile_0, slot_0, tile_1, slot_1 = tile_1, slot_1, tile_2, slot_2
    mixed = tl.sum(total, axis=1).to(out.dtype.element_ty).to(tl.float32)
    before = tl.load(residual + row, mask=row < H, other=0).to(tl.float32)
    tl.store(out + row, (before + mixed).to(out.dtype.element_ty), mask=row < H)


def check_expert_mlp(
    x: torch.Tensor,
    h: torch.Tensor,
    slots: torch.Tensor,
    resolved: Resolved,
    weights: torch.Tensor,
    fmt: ExpertFormat,
) -> None:
    check("x", x, FLOATS, (1, fmt.hidden), x.device)
    check("h", h, x.dtype, (1, fmt.hidden), x.device)
    check_slots(slots, fmt, x.device)
    check("resolved.slots", resolved.slots, torch.int32, (-1,), x.device)
    check("resolved.num_misses", resolved.num_misses, torch.int32, (1,), x.device)
    check("weights", weights, torch.float32, resolved.slots.shape, x.device)


def _typed_views(slots: torch.Tensor, fmt: ExpertFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots as weights and as f32 scales."""
    weights = slots.view(fmt.weight_dtype)
    fp8 = fmt.weight_dtype == torch.float8_e4m3fn
    return kernel_codes(weights) if fp8 else weights, slots.view(torch.float32)


def gate_up_triton(
    h: torch.Tensor,
    slots: torch.Tensor,
    resolved: Resolved,
    fmt: ExpertFormat,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """The activations [K, I] of one token's experts."""
    weights, scales = _typed_views(slots, fmt)
    size = fmt.weight_dtype.itemsize
    num_pairs = len(resolved.slots)
    tiling = tiling or narrow_tiling(8, fmt.hidden, fmt.weight_dtype)
    act = torch.empty((num_pairs, fmt.inter), dtype=h.dtype, device=h.device)
    _gate_up_kernel[(triton.cdiv(fmt.inter, tiling.rows), num_pairs)](
        h,
        weights,
        scales,
        resolved.slots,
        resolved.num_misses,
        act,
        weights.stride(0),
        scales.stride(0),
        fmt.hidden,
        fmt.inter,
        fmt.gate // size,
        fmt.up // size,
        fmt.gate_scale // 4,
        fmt.up_scale // 4,
        tiling.rows,
        tiling.columns,
        tiling.tiles,
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
        **pdl_options(h.device),
    )
    return act


def down_triton(
    act: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor,
    fmt: ExpertFormat,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`residual` [1, H] plus the `down` products of the activations [K, I], weighted."""
    codes, scales = _typed_views(slots, fmt)
    num_pairs = len(pair_slots)
    if tiling is None:
        tiling = tiling_for(fmt.hidden, fmt.inter * num_pairs, fmt.weight_dtype, act.device)
        tiling = tiling._replace(rows=max(tiling.rows // 2, 2), num_warps=2)
    out = torch.empty_like(residual)
    _down_kernel[(triton.cdiv(fmt.hidden, tiling.rows),)](
        act,
        codes,
        scales,
        pair_slots,
        weights,
        residual,
        out,
        codes.stride(0),
        scales.stride(0),
        fmt.hidden,
        fmt.inter,
        fmt.down // fmt.weight_dtype.itemsize,
        fmt.down_scale // 4,
        num_pairs,
        tiling.rows,
        tiling.columns,
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
        **pdl_options(act.device),
    )
    return out


def expert_mlp_triton(
    x: torch.Tensor,
    h: torch.Tensor,
    slots: torch.Tensor,
    resolved: Resolved,
    weights: torch.Tensor,
    fmt: ExpertFormat,
) -> torch.Tensor:
    check_kernel_device(x)
    check_expert_mlp(x, h, slots, resolved, weights, fmt)
    act = gate_up_triton(h, slots, resolved, fmt)
    return down_triton(act, slots, resolved.slots, weights, x, fmt)


def expert_mlp(
    x: torch.Tensor,
    h: torch.Tensor,
    slots: torch.Tensor,
    resolved: Resolved,
    weights: torch.Tensor,
    fmt: ExpertFormat,
) -> torch.Tensor:
    """Return x plus the sum over K of `weights` times down(silu(gate(h)) * up(h)).

    `x` and `h` are [1, H], `slots` uint8 [S, R]. The K experts lie in `resolved.slots`, the missed
    ones since a `fetch` right before, and weigh `weights` (f32 [K]). Products and their sums are
    f32; the activation and the sum over the experts are rounded to the dtype of `x`. The bits do
    not depend on which slots they are.
    """
    run = expert_mlp_triton if x.is_cuda else expert_mlp_reference
    return run(x, h, slots, resolved, weights, fmt)
