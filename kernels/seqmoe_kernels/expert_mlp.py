"""The experts of chosen (token, expert) pairs, computed from the records that lie in slots.

One token: two matrix-vector kernels over all of its pairs, gate and up with the activation, then
down. Many tokens: one expert after the other, its weights decoded for a matrix product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from seqmoe_kernels.checks import FLOATS, check, check_kernel_device
from seqmoe_kernels.formats import ExpertFormat
from seqmoe_kernels.fp8 import dequantize, num_blocks
from seqmoe_kernels.gemv import Tiling, block_row, dot_rows, tiling_for


def record_part(
    record: torch.Tensor, offset: int, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """View `shape` elements of `dtype` at byte `offset` of a uint8 record, without a copy."""
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    return record[offset : offset + num_bytes].view(dtype).view(shape)


def expert_weights(
    record: torch.Tensor, fmt: ExpertFormat, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return gate, up [I, H] and down [H, I] of a uint8 record, decoded to `dtype`."""
    wide, tall = (fmt.inter, fmt.hidden), (fmt.hidden, fmt.inter)
    weights = []
    for shape, offset, scale_offset in (
        (wide, fmt.gate, fmt.gate_scale),
        (wide, fmt.up, fmt.up_scale),
        (tall, fmt.down, fmt.down_scale),
    ):
        weight = record_part(record, offset, shape, fmt.weight_dtype)
        if fmt.weight_dtype == torch.float8_e4m3fn:
            scale = record_part(record, scale_offset, num_blocks(*shape), torch.float32)
            weights.append(dequantize(weight, scale, dtype))
        else:
            weights.append(weight.to(dtype))
    return weights


def _pairs_by_slot(pair_slots: torch.Tensor) -> dict[int, torch.Tensor]:
    """Map each slot in use to the flat indices (int64, ascending) of its pairs. Waits for a GPU."""
    pairs: dict[int, list[int]] = {}
    for pair, slot in enumerate(pair_slots.flatten().tolist()):
        if slot >= 0:
            pairs.setdefault(slot, []).append(pair)
    order = [pair for group in pairs.values() for pair in group]
    indices = torch.tensor(order, dtype=torch.int64, device=pair_slots.device)
    groups = indices.split([len(group) for group in pairs.values()])
    return dict(zip(pairs, groups, strict=True))


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x weight^T in f32, summed in f32."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()


def _expert_by_expert(
    x: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    fmt: ExpertFormat,
    out: torch.Tensor,
    weight_dtype: torch.dtype,
) -> None:
    for slot, pairs in _pairs_by_slot(pair_slots).items():
        gate, up, down = expert_weights(slots[slot], fmt, weight_dtype)
        rows = x[pairs // pair_slots.shape[1]]
        act = F.silu(_product(rows, gate)) * _product(rows, up)
        out.view(-1, fmt.hidden)[pairs] = _product(act.to(x.dtype), down)


def expert_pairs_reference(
    x: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    fmt: ExpertFormat,
    out: torch.Tensor,
) -> None:
    _expert_by_expert(x, slots, pair_slots, fmt, out, torch.float32)


@triton.jit
def _gate_up_kernel(
    x,
    weights,
    scales,
    pair_slots,
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
):
    pair = tl.program_id(1)
    slot = tl.load(pair_slots + pair).to(tl.int64)
    if slot >= 0:
        first = tl.program_id(0) * ROWS
        lane = tl.arange(0, 2 * ROWS)  # rows of gate and up in turn
        row = first + lane // 2
        starts = slot * slot_weights + GATE + lane % 2 * (UP - GATE) + row * H
        of_slot = scales + slot * slot_scales + block_row(first, H)
        of_gate, of_up = of_slot + GATE_SCALE, of_slot + UP_SCALE
        both = dot_rows(weights, starts, row < I, x, of_gate, of_up, H, BLOCK_K, TILES)
        gate, up = tl.split(tl.reshape(both, (ROWS, 2)))
        value = gate / (1 + tl.exp(-gate)) * up
        row = first + tl.arange(0, ROWS)
        tl.store(act + pair * I + row, value.to(act.dtype.element_ty), mask=row < I)


@triton.jit
def _down_kernel(
    act,
    weights,
    scales,
    pair_slots,
    out,
    slot_weights,
    slot_scales,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    DOWN: tl.constexpr,
    DOWN_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
):
    pair = tl.program_id(1)
    slot = tl.load(pair_slots + pair).to(tl.int64)
    if slot >= 0:
        first = tl.program_id(0) * ROWS
        row = first + tl.arange(0, ROWS)
        starts = slot * slot_weights + DOWN + row * I
        of_slot = scales + slot * slot_scales + DOWN_SCALE + block_row(first, I)
        x = act + pair * I
        value = dot_rows(weights, starts, row < H, x, of_slot, of_slot, I, BLOCK_K, TILES)
        tl.store(out + pair * H + row, value, mask=row < H)


def check_expert_pairs(
    x: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    fmt: ExpertFormat,
    out: torch.Tensor,
) -> None:
    check("x", x, FLOATS, (-1, fmt.hidden), x.device)
    check("slots", slots, torch.uint8, (-1, fmt.record_bytes), x.device)
    check("pair_slots", pair_slots, torch.int32, (x.shape[0], -1), x.device)
    check("out", out, torch.float32, (*pair_slots.shape, fmt.hidden), x.device)
    if fmt.weight_dtype not in (*FLOATS, torch.float8_e4m3fn):
        raise ValueError(f"records of {fmt.weight_dtype} are not supported")
    if fmt.hidden % 16 or fmt.inter % 16:
        sizes = f"{fmt.inter} x {fmt.hidden}"
        raise ValueError(f"experts are {sizes}, expected multiples of 16")
    offsets = (fmt.gate, fmt.up, fmt.down, fmt.record_bytes)
    if any(offset % 16 for offset in offsets):
        raise ValueError(f"record offsets are {offsets}, expected multiples of 16")


def _typed_views(slots: torch.Tensor, fmt: ExpertFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots as weights (FP8 codes as int8) and as f32 scales."""
    fp8 = fmt.weight_dtype == torch.float8_e4m3fn
    return slots.view(torch.int8 if fp8 else fmt.weight_dtype), slots.view(torch.float32)


def gate_up_triton(
    x: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    fmt: ExpertFormat,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """The activations [K, I] of one token's pairs; the row of a pair without a slot is not set."""
    weights, scales = _typed_views(slots, fmt)
    size = fmt.weight_dtype.itemsize
    num_pairs = pair_slots.shape[1]
    if tiling is None:  # a program reads two rows for each one that it writes
        tiling = tiling_for(2 * fmt.inter * num_pairs, fmt.hidden, fmt.weight_dtype, x.device)
        tiling = tiling._replace(rows=tiling.rows // 2)
    act = torch.empty((num_pairs, fmt.inter), dtype=x.dtype, device=x.device)
    _gate_up_kernel[(triton.cdiv(fmt.inter, tiling.rows), num_pairs)](
        x,
        weights,
        scales,
        pair_slots,
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
    )
    return act


def down_triton(
    act: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    fmt: ExpertFormat,
    out: torch.Tensor,
    tiling: Tiling | None = None,
) -> None:
    """Write the `down` products of one token's activations [K, I] into `out` (f32 [1, K, H])."""
    weights, scales = _typed_views(slots, fmt)
    num_pairs = pair_slots.shape[1]
    if tiling is None:
        tiling = tiling_for(fmt.hidden * num_pairs, fmt.inter, fmt.weight_dtype, act.device)
    _down_kernel[(triton.cdiv(fmt.hidden, tiling.rows), num_pairs)](
        act,
        weights,
        scales,
        pair_slots,
        out,
        weights.stride(0),
        scales.stride(0),
        fmt.hidden,
        fmt.inter,
        fmt.down // fmt.weight_dtype.itemsize,
        fmt.down_scale // 4,
        tiling.rows,
        tiling.columns,
        tiling.tiles,
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
    )


def expert_pairs_triton(
    x: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    fmt: ExpertFormat,
    out: torch.Tensor,
) -> None:
    check_kernel_device(x)
    check_expert_pairs(x, slots, pair_slots, fmt, out)
    if x.shape[0] == 1:
        act = gate_up_triton(x, slots, pair_slots, fmt)
        down_triton(act, slots, pair_slots, fmt, out)
    else:
        _expert_by_expert(x, slots, pair_slots, fmt, out, x.dtype)


def expert_pairs(
    x: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    fmt: ExpertFormat,
    out: torch.Tensor,
) -> None:
    """Write down(silu(gate(x)) * up(x)) of every pair into `out` (f32 [T, K, H]).

    `x` is [T, H], `slots` uint8 [S, R]; `pair_slots` (int32 [T, K]) names the slot of the k-th
    expert of a token, -1 leaves `out` as it is. Sums are f32; the activation is rounded to the
    dtype of `x`. A pair's bits depend neither on its slot nor on the other experts of the call.
    With T > 1 the host waits for `pair_slots`.
    """
    run = expert_pairs_triton if x.is_cuda else expert_pairs_reference
    run(x, slots, pair_slots, fmt, out)
