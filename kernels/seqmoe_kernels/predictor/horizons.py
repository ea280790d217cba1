"""From the state of a predictor, a vector for each window of steps ahead."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.dense.norm import Norm, inverse_rms, rms_norm_reference
from seqmoe_kernels.dense.tensor_core_gemv import load_tile
from seqmoe_kernels.eviction.units import NUM_WINDOWS
from seqmoe_kernels.predictor.f32_gemv import check_width, dot_rows, tiling_for, vector
from seqmoe_kernels.predictor.gru import sigmoid


def window_vectors_reference(
    x: torch.Tensor, norm: Norm, matrix: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    z = rms_norm_reference(x, norm.weight.float(), norm.eps)
    return z + F.silu(matrix.float() @ z + bias.float()).view(-1, len(z))


@triton.jit
def _window_kernel(
    x,
    norm,
    matrix,
    bias,
    out,
    num_rows,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    gain, eps = norm
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    starts = row.to(tl.int64) * D
    ahead = load_tile(matrix, starts, inside, tl.arange(0, BLOCK_K), D)
    result = tl.load(bias + row, mask=inside, other=0).to(tl.float32)
    wait_for_inputs(PDL)
    inv_rms = inverse_rms(x, eps, D, BLOCK_D)
    result += dot_rows(ahead, matrix, starts, inside, x, gain, inv_rms, D, BLOCK_K, TILES, True)
    z = vector(x, gain, inv_rms, row % D, D, True)
    tl.store(out + row, z + result * sigmoid(result), mask=inside)


@verb(window_vectors_reference)
def window_vectors(
    x: torch.Tensor, norm: Norm, matrix: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """With z = norm(`x`), x f32 [D], and `matrix` [W * D, D]: z + silu(matrix z + bias), f32
    [W, D]."""
    num_rows, width = matrix.shape
    check_width(width)
    check("x", x, torch.float32, (width,), x.device)
    check("norm.weight", norm.weight, FLOATS, (width,), x.device)
    check("matrix", matrix, FLOATS, (NUM_WINDOWS * width, width), x.device)
    check("bias", bias, FLOATS, (num_rows,), x.device)
    tiling = tiling_for(num_rows, width, matrix.dtype, x.device)
    out = torch.empty((NUM_WINDOWS, width), dtype=torch.float32, device=x.device)
    _window_kernel[(triton.cdiv(num_rows, tiling.rows),)](
        x=x,
        norm=norm,
        matrix=matrix,
        bias=bias,
        out=out,
        num_rows=num_rows,
        D=width,
        ROWS=tiling.rows,
        BLOCK_K=tiling.columns,
        TILES=tiling.tiles,
        BLOCK_D=triton.next_power_of_2(width),
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
        **pdl_options(x.device),
    )
    return out
