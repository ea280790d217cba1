"""The experts of one token, from the records that lie in slots: two matrix-vector kernels.

The first multiplies with gate and up of all chosen experts and activates; the second multiplies
with down, adds up the experts with their weights, and adds the residual stream.
"""

from __future__ import annotations

import torch
import triton

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.dense.tensor_core_gemv import gemv_options
from seqmoe_kernels.dense.tiling import RowTiling, down_tiling, gate_up_tiling
from seqmoe_kernels.experts.combine import combine_reference
from seqmoe_kernels.experts.mlp_kernels import _down_kernel, _gate_up_kernel
from seqmoe_kernels.experts.prefill import expert_pairs
from seqmoe_kernels.experts.record import ExpertFormat, check_slots
from seqmoe_kernels.pool.resolve import Resolved


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


def gate_up(
    h: torch.Tensor, slots: torch.Tensor, resolved: Resolved, fmt: ExpertFormat, tiling: RowTiling
) -> torch.Tensor:
    """The activations [K, I] of one token's experts."""
    num_pairs = len(resolved.slots)
    act = torch.empty((num_pairs, fmt.inter), dtype=h.dtype, device=h.device)
    _gate_up_kernel[(triton.cdiv(fmt.inter, tiling.rows), num_pairs)](
        h=h,
        slots=fmt.gate.views(slots),
        resolved=resolved,
        act=act,
        fmt=fmt.gate.format.tiles,
        activation=fmt.activation.kernel,
        H=fmt.hidden,
        I=fmt.inter,
        GATE=fmt.gate.part_offsets,
        UP=fmt.up.part_offsets,
        BLOCK_K=triton.next_power_of_2(num_pairs),
        **gemv_options(fmt.gate.format, tiling, h),
    )
    return act


def down(
    act: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor,
    fmt: ExpertFormat,
    tiling: RowTiling,
) -> torch.Tensor:
    """`residual` [1, H] plus the `down` products of the activations [K, I], weighted."""
    out = torch.empty_like(residual)
    _down_kernel[(triton.cdiv(fmt.hidden, tiling.rows),)](
        act=act,
        slots=fmt.down.views(slots),
        pair_slots=pair_slots,
        pair_weights=weights,
        residual=residual,
        out=out,
        fmt=fmt.down.format.tiles,
        H=fmt.hidden,
        I=fmt.inter,
        DOWN=fmt.down.part_offsets,
        TOP_K=len(pair_slots),
        **gemv_options(fmt.down.format, tiling, act),
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
    """Return x plus the sum over K of `weights` times down(activation(gate(h), up(h))).

    `x` and `h` are [1, H], `slots` uint8 [S, R]. The K experts lie in `resolved.slots`, the missed
    ones since a `fetch` right before, and weigh `weights` (f32 [K]). Products and their sums are
    f32; the activation and the sum over the experts are rounded to the dtype of `x`. The bits do
    not depend on which slots they are.
    """
    check("x", x, FLOATS, (1, fmt.hidden), x.device)
    check("h", h, x.dtype, (1, fmt.hidden), x.device)
    check_slots(slots, fmt, x.device)
    check("resolved.slots", resolved.slots, torch.int32, (-1,), x.device)
    check("resolved.miss_slots", resolved.miss_slots, torch.int32, resolved.slots.shape, x.device)
    check("resolved.num_misses", resolved.num_misses, torch.int32, (1,), x.device)
    check("weights", weights, torch.float32, resolved.slots.shape, x.device)
    act = gate_up(h, slots, resolved, fmt, gate_up_tiling(fmt.gate.row_bytes))
    tiling = down_tiling(fmt.down.row_bytes * len(weights))
    return down(act, slots, resolved.slots, weights, x, fmt, tiling)
