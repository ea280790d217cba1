"""The experts of one token, from the records that lie in slots: two matrix-vector kernels.

The first multiplies with gate and up of all chosen experts and activates; the second multiplies
with down, adds up the experts with their weights, and adds the residual stream.
"""

from __future__ import annotations

import torch
import triton

from seqmoe_kernels.common.checks import FLOATS, check, check_kernel_device
from seqmoe_kernels.common.launch import pdl_options
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.dense.tensor_core_gemv import on_tensor_cores, operand_of
from seqmoe_kernels.dense.tiling import RowTiling, down_tiling, gate_up_tiling
from seqmoe_kernels.experts.combine import combine_reference
from seqmoe_kernels.experts.mlp_kernels import _down_kernel, _gate_up_kernel
from seqmoe_kernels.experts.prefill import check_slots, expert_pairs
from seqmoe_kernels.formats.fp8_block import kernel_codes
from seqmoe_kernels.pool.resolve import Resolved
from seqmoe_kernels.state import ExpertFormat


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
    check("resolved.miss_slots", resolved.miss_slots, torch.int32, resolved.slots.shape, x.device)
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
    tiling: RowTiling | None = None,
) -> torch.Tensor:
    """The activations [K, I] of one token's experts."""
    weights, scales = _typed_views(slots, fmt)
    size = fmt.weight_dtype.itemsize
    num_pairs = len(resolved.slots)
    tiling = tiling or gate_up_tiling(fmt.hidden, fmt.weight_dtype)
    act = torch.empty((num_pairs, fmt.inter), dtype=h.dtype, device=h.device)
    _gate_up_kernel[(triton.cdiv(fmt.inter, tiling.rows), num_pairs)](
        h,
        weights,
        scales,
        resolved.slots,
        resolved.miss_slots,
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
        triton.next_power_of_2(num_pairs),
        tiling.rows,
        tiling.tiles,
        tiling.num_warps,
        operand_of(weights, h),
        on_tensor_cores(weights, h),
        num_warps=tiling.num_warps,
        num_stages=1,  # nothing is to be read ahead of `wait_for_inputs`
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
    tiling: RowTiling | None = None,
) -> torch.Tensor:
    """`residual` [1, H] plus the `down` products of the activations [K, I], weighted."""
    codes, scales = _typed_views(slots, fmt)
    num_pairs = len(pair_slots)
    tiling = tiling or down_tiling(fmt.inter * num_pairs, fmt.weight_dtype)
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
        tiling.tiles,
        tiling.num_warps,
        operand_of(codes, act),
        on_tensor_cores(codes, act),
        num_warps=tiling.num_warps,
        num_stages=1,  # nothing is to be read ahead of `wait_for_inputs`
        enable_fp_fusion=True,
        **pdl_options(act.device),
    )
    return out


@verb(expert_mlp_reference)
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
    check_kernel_device(x)
    check_expert_mlp(x, h, slots, resolved, weights, fmt)
    act = gate_up_triton(h, slots, resolved, fmt)
    return down_triton(act, slots, resolved.slots, weights, x, fmt)
