"""One step of a gated recurrent unit: norm, both products, gates and residual in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.dense.norm import Norm, inverse_rms, rms_norm_reference
from seqmoe_kernels.dense.tensor_core_gemv import load_tile
from seqmoe_kernels.predictor.f32_gemv import check_width, dot_rows, wide_tiling


class GruWeights(NamedTuple):
    """Matrices [3D, D] for the input and for the state, and their biases [3D]. Their rows are those
    of the gates reset, update and new, one behind the other."""

    own: torch.Tensor
    past: torch.Tensor
    own_bias: torch.Tensor
    past_bias: torch.Tensor


def gru_step_reference(
    x: torch.Tensor, norm: Norm, weights: GruWeights, past: torch.Tensor, present: torch.Tensor
) -> torch.Tensor:
    h = rms_norm_reference(x, norm.weight.float(), norm.eps)
    own, state = (
        matrix.float() @ vector + bias.float()
        for matrix, vector, bias in (
            (weights.own, h, weights.own_bias),
            (weights.past, past, weights.past_bias),
        )
    )
    (reset, update, new), (reset_past, update_past, new_past) = own.chunk(3), state.chunk(3)
    update = (update + update_past).sigmoid()
    new = (new + (reset + reset_past).sigmoid() * new_past).tanh()
    present.copy_((1 - update) * new + update * past)
    return x + present


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _gate(values, place, n: tl.constexpr, UNITS: tl.constexpr):
    """Of rows [UNITS * 4], four for each unit, the one in place `n`: [UNITS]."""
    by_unit = tl.reshape(tl.where(place == n, values, 0.0), (UNITS, 4))
    return tl.sum(by_unit, 1)


@triton.jit
def _gru_kernel(
    x,
    norm,
    weights,
    past,
    present,
    out,
    D: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    i = tl.arange(0, UNITS * 4)
    place, unit = i % 4, tl.program_id(0) * UNITS + i // 4  # the fourth place stays empty
    inside = (place < 3) & (unit < D)
    row = place * D + unit
    starts = row.to(tl.int64) * D
    column = tl.arange(0, BLOCK_K)
    gain, eps = norm
    ahead = load_tile(weights.own, starts, inside, column, D)
    # The state is that of the step before: nothing that still runs writes it.
    first = load_tile(weights.past, starts, inside, column, D)
    b = dot_rows(first, weights.past, starts, inside, past, gain, 0.0, D, BLOCK_K, TILES, False)
    b += tl.load(weights.past_bias + row, mask=inside, other=0).to(tl.float32)
    a = tl.load(weights.own_bias + row, mask=inside, other=0).to(tl.float32)
    wait_for_inputs(PDL)
    inv_rms = inverse_rms(x, eps, D, BLOCK_D)
    a += dot_rows(ahead, weights.own, starts, inside, x, gain, inv_rms, D, BLOCK_K, TILES, True)
    reset = sigmoid(_gate(a + b, place, 0, UNITS))
    update = sigmoid(_gate(a + b, place, 1, UNITS))
    new = _gate(a, place, 2, UNITS) + reset * _gate(b, place, 2, UNITS)
    new = 2 * sigmoid(2 * new) - 1  # its tanh
    at = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    before = tl.load(past + at, mask=at < D, other=0)
    state = (1 - update) * new + update * before
    tl.store(present + at, state, mask=at < D)
    tl.store(out + at, tl.load(x + at, mask=at < D, other=0) + state, mask=at < D)


@verb(gru_step_reference)
def gru_step(
    x: torch.Tensor, norm: Norm, weights: GruWeights, past: torch.Tensor, present: torch.Tensor
) -> torch.Tensor:
    """`x` f32 [D], normed, and the state `past` f32 [D] make the new state: it is written to
    `present`, which must be other memory, and x + present is returned.

    Between the kernel that writes `past` and this one must be one that waits before it lets others
    start, as `sum_rows` does.
    """
    width, dtype = len(x), weights.own.dtype
    check_width(width)
    for name, vector in (("x", x), ("past", past), ("present", present)):
        check(name, vector, torch.float32, (width,), x.device)
    check("norm.weight", norm.weight, FLOATS, (width,), x.device)
    for name, tensor in weights._asdict().items():
        sizes = (3 * width,) if name.endswith("bias") else (3 * width, width)
        check(name, tensor, dtype, sizes, x.device)
    # As measured on an H200 for a width of 768: few units, whole rows on their way at once.
    tiling = wide_tiling(2, width, dtype)
    out = torch.empty_like(x)
    _gru_kernel[(triton.cdiv(width, tiling.rows),)](
        x=x,
        norm=norm,
        weights=weights,
        past=past,
        present=present,
        out=out,
        D=width,
        UNITS=tiling.rows,
        BLOCK_K=tiling.columns,
        TILES=tiling.tiles,
        BLOCK_D=triton.next_power_of_2(width),
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
        **pdl_options(x.device),
    )
    return out
