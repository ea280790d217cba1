"""Linear layers whose weights may be FP8: a matrix-vector kernel for one token.

One launch takes what belongs together: the norm before the product, up to three matrices that read
the same vector, the residual stream after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check, check_kernel_device
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.dense.f32_gemv import load_tile
from seqmoe_kernels.dense.norm import Norm, inverse_rms, normalized, rms_norm, rms_norm_reference
from seqmoe_kernels.dense.tensor_core_gemv import (
    TILE_BITS,
    add_products,
    no_sums,
    on_tensor_cores,
    operand_of,
    row_sums,
    slice_starts,
    slices_of_rows,
    slices_of_vector,
    vector_columns,
)
from seqmoe_kernels.dense.tiling import RowTiling, linear_tiling
from seqmoe_kernels.formats.fp8_block import (
    BLOCK,
    block_row,
    dequantize,
    dequantize_reference,
    kernel_codes,
    num_blocks,
)

MAX_MATRICES = 3

_BLOCK = tl.constexpr(BLOCK)


class Matrix(NamedTuple):
    """A linear layer: `weight` [out, in] in the dtype of its input, or float8_e4m3fn with `scale`
    f32 [out/128, in/128] (rounded up), by which its 128x128 blocks are multiplied; `bias` [out]."""

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def linear_reference(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    weight, scale, bias = matrix
    if scale is None:
        return F.linear(x, weight, bias)
    wide = F.linear(x.float(), dequantize_reference(weight, scale, torch.float32))
    return (wide if bias is None else wide + bias).to(x.dtype)


def linears_reference(
    x: torch.Tensor,
    matrices: Sequence[Matrix],
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    h = x if norm is None else rms_norm_reference(x, *norm)
    out = [linear_reference(h, matrix) for matrix in matrices]
    return out if residual is None else [residual + product for product in out]


@triton.jit
def _normed(value, gain, inv_rms):
    return normalized(value.to(tl.float32), gain.to(tl.float32), inv_rms, value.dtype)


@triton.jit
def _square(value):
    return value.to(tl.float32) * value.to(tl.float32)


@triton.jit
def _gemv_kernel(
    x,
    gain,
    eps,
    residual,
    normed,
    out,
    weight,
    scale,
    bias,
    rows,
    weight_1,
    scale_1,
    bias_1,
    rows_1,
    weight_2,
    scale_2,
    bias_2,
    rows_2,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    OPERAND: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    MATRICES: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    block, place = tl.program_id(0), 0
    if MATRICES > 1:  # noqa: SIM102 (one condition is the compiler's)
        if block >= tl.cdiv(rows, ROWS):
            block, place = block - tl.cdiv(rows, ROWS), place + rows
            weight, scale, bias, rows = weight_1, scale_1, bias_1, rows_1
            if MATRICES > 2:  # noqa: SIM102
                if block >= tl.cdiv(rows, ROWS):
                    block, place = block - tl.cdiv(rows, ROWS), place + rows
                    weight, scale, bias, rows = weight_2, scale_2, bias_2, rows_2
    dtype: tl.constexpr = weight.dtype.element_ty
    COLUMNS: tl.constexpr = WARPS * (TILE_BITS // dtype.primitive_bitwidth)
    SLICE: tl.constexpr = TILE_BITS // 8 // dtype.primitive_bitwidth
    row = block * ROWS + tl.arange(0, ROWS)
    starts, inside = row.to(tl.int64) * K, row < rows
    scales = scale + block_row(block * ROWS, K)
    of_slices = slice_starts(SLICE, WARPS)
    at = vector_columns(SLICE, WARPS, 16 // (x.dtype.element_ty.primitive_bitwidth // 8))
    sums = no_sums(ROWS, WARPS, TENSOR_CORES)
    shift = tl.zeros((ROWS,), x.dtype.element_ty)
    before, inv_rms = shift, 0.0
    if BIAS:
        shift = tl.load(bias + row, mask=inside, other=0)
    for batch in range(0, K, TILES * COLUMNS):
        tiles, factors, gains, vectors = (), (), (), ()
        for i in tl.static_range(TILES):
            column = batch + i * COLUMNS + tl.arange(0, COLUMNS)
            tiles += (load_tile(weight, starts, inside, column, K),)  # type: ignore[assignment]
        for i in tl.static_range(TILES):
            if dtype.primitive_bitwidth == 8:
                begin = batch + i * COLUMNS + of_slices
                factors += (tl.load(scales + begin // _BLOCK, mask=begin < K, other=0.0),)  # type: ignore[assignment]
            if NORM:
                column = batch + i * COLUMNS + at
                gains += (tl.load(gain + column, mask=column < K, other=0.0),)  # type: ignore[assignment]
        if batch == 0:
            wait_for_inputs(PDL)
            if RESIDUAL:
                before = tl.load(residual + place + row, mask=inside, other=0)
                tl.debug_barrier()  # or the compiler would put this off, it is wanted last
        for i in tl.static_range(TILES):
            column = batch + i * COLUMNS + at
            vectors += (tl.load(x + column, mask=column < K, other=0.0),)  # type: ignore[assignment]
        if NORM:
            if TILES * COLUMNS >= K:
                squares = tl.zeros(at.shape, tl.float32)
                for i in tl.static_range(TILES):
                    squares += _square(vectors[i])
                inv_rms = tl.rsqrt(tl.sum(squares) / K + eps)
            elif batch == 0:
                inv_rms = inverse_rms(x, eps, K, BLOCK_H)
        for i in tl.static_range(TILES):
            value = _normed(vectors[i], gains[i], inv_rms) if NORM else vectors[i]
            if KEEP:  # noqa: SIM102 (one condition is the compiler's)
                if tl.program_id(0) == 0:
                    column = batch + i * COLUMNS + at
                    tl.store(normed + column, value, mask=column < K)
            vector, factor = slices_of_vector(value, OPERAND, dtype)
            if dtype.primitive_bitwidth == 8:
                factor *= factors[i]
            slices = slices_of_rows(tiles[i], OPERAND, WARPS)
            factor = tl.broadcast_to(factor[:, None, :], (WARPS, ROWS, 8))
            sums = add_products(sums, slices, vector, factor, TENSOR_CORES)
    result = row_sums(sums, ROWS, TENSOR_CORES)
    if BIAS:
        result += shift.to(tl.float32)
    result = result.to(out.dtype.element_ty)
    if RESIDUAL:
        result = (before.to(tl.float32) + result.to(tl.float32)).to(result.dtype)
    tl.store(out + place + row, result, mask=inside)


def check_linears(
    x: torch.Tensor, matrices: Sequence[Matrix], norm: Norm | None, residual: torch.Tensor | None
) -> None:
    check("x", x, FLOATS, (-1, -1), x.device)
    hidden = x.shape[1]
    if not 1 <= len(matrices) <= MAX_MATRICES:
        raise ValueError(f"{len(matrices)} matrices, expected 1 to {MAX_MATRICES}")
    if len({(m.scale is None, m.bias is None) for m in matrices}) > 1:
        raise ValueError("some matrices have scales or biases, others have none")
    for weight, scale, bias in matrices:
        dtype = x.dtype if scale is None else torch.float8_e4m3fn
        check("weight", weight, dtype, (-1, hidden), x.device)
        if scale is not None:
            check("scale", scale, torch.float32, num_blocks(*weight.shape), x.device)
        if bias is not None:
            check("bias", bias, x.dtype, (len(weight),), x.device)
    if norm is not None:
        check("norm.weight", norm.weight, x.dtype, (hidden,), x.device)
    if residual is not None:
        check("residual", residual, x.dtype, (x.shape[0], len(matrices[0].weight)), x.device)


def linears_triton(
    x: torch.Tensor,
    matrices: Sequence[Matrix],
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    tiling: RowTiling | None = None,
) -> list[torch.Tensor]:
    check_kernel_device(x)
    check_linears(x, matrices, norm, residual)
    if x.shape[0] == 1:
        row = one_token(x, matrices, norm, residual, tiling)
        return list(row.split([len(matrix.weight) for matrix in matrices], dim=1))
    h = x if norm is None else rms_norm(x, *norm)
    out = []
    for weight, scale, bias in matrices:
        plain = weight if scale is None else dequantize(weight, scale, x.dtype)
        out.append(F.linear(h, plain, bias))
    return out if residual is None else [residual + product for product in out]


def one_token(
    x: torch.Tensor,
    matrices: Sequence[Matrix],
    norm: Norm | None,
    residual: torch.Tensor | None,
    tiling: RowTiling | None,
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The products of `x` [1, in] one behind the other, [1, sum of out]; norm(x) into `normed`."""
    cols, sizes = x.shape[1], [len(matrix.weight) for matrix in matrices]
    if cols % 16:
        raise ValueError(f"weight has {cols} columns, expected a multiple of 16")
    out = torch.empty((1, sum(sizes)), dtype=x.dtype, device=x.device)
    tiling = tiling or linear_tiling(sum(sizes), cols, matrices[0].weight.dtype, x.device)
    arguments: list[Any] = []
    for weight, scale, bias in [*matrices, *[matrices[0]] * MAX_MATRICES][:MAX_MATRICES]:
        codes = weight if scale is None else kernel_codes(weight)
        # what a kernel has no use for must still be a pointer, or it could not choose among three
        arguments += [codes, codes if scale is None else scale, x if bias is None else bias]
        arguments.append(len(weight))
    _gemv_kernel[(sum(triton.cdiv(size, tiling.rows) for size in sizes),)](
        x,
        x if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        x if residual is None else residual,
        x if normed is None else normed,
        out,
        *arguments,
        cols,
        tiling.rows,
        tiling.tiles,
        tiling.num_warps,
        operand_of(arguments[0], x),
        on_tensor_cores(arguments[0], x),
        triton.next_power_of_2(cols),
        len(matrices),
        norm is not None,
        normed is not None,
        residual is not None,
        matrices[0].bias is not None,
        num_warps=tiling.num_warps,
        num_stages=1,  # nothing is to be read ahead of `wait_for_inputs`
        enable_fp_fusion=True,
        **pdl_options(x.device),
    )
    return out


def linears(
    x: torch.Tensor,
    matrices: Sequence[Matrix],
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return `x` [T, in], after the `norm` if there is one, times the transpose of each of up to
    three matrices [out, in], plus its bias, plus `residual` [T, out]: [T, out] in the dtype of x.

    The product is rounded to that dtype before the residual is added. Either all matrices have
    scales, or none, and likewise biases.
    """
    run = linears_triton if x.is_cuda else linears_reference
    return run(x, matrices, norm, residual)


def linear(
    x: torch.Tensor,
    matrix: Matrix,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linears` of one matrix."""
    return linears(x, (matrix,), norm, residual)[0]
