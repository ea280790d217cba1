"""Linear layers: a matrix-vector kernel for one token, matrix products for several.

One launch takes what belongs together: the norm before the product, up to three matrices that read
the same vector, the residual stream after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.common.launch import let_next_start, wait_for_inputs
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.dense.norm import Norm, inverse_rms, normalized, rms_norm, rms_norm_reference
from seqmoe_kernels.dense.tensor_core_gemv import (
    TILE_BITS,
    add_products,
    gemv_options,
    load_tile,
    no_sums,
    row_sums,
    slice_starts,
    slices_of_rows,
    slices_of_vector,
    vector_columns,
)
from seqmoe_kernels.dense.tiling import RowTiling, linear_tiling
from seqmoe_kernels.formats import Format, check_parts, format_of

MAX_MATRICES = 3


class Matrix(NamedTuple):
    """A linear layer [out, in]: the parts of its weight, how they store it, and its `bias` [out] in
    the dtype of its input."""

    parts: tuple[torch.Tensor, ...]
    format: Format
    bias: torch.Tensor | None = None

    @classmethod
    def of(cls, *parts: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
        """In the format that has the name of the weight's dtype."""
        return cls(parts, format_of(parts[0]), bias)

    @property
    def rows(self) -> int:
        return len(self.parts[0])


def linear_reference(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    parts, fmt, bias = matrix
    if parts[0].dtype == x.dtype:
        return F.linear(x, parts[0], bias)
    wide = F.linear(x.float(), fmt.decode(parts, torch.float32))
    return (wide if bias is None else wide + bias).to(x.dtype)


def linears_reference(
    x: torch.Tensor,
    matrices: Sequence[Matrix],
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    h = x if norm is None else rms_norm_reference(x, *norm)
    return _added(residual, [linear_reference(h, matrix) for matrix in matrices])


def _added(residual: torch.Tensor | None, products: list[torch.Tensor]) -> list[torch.Tensor]:
    return products if residual is None else [residual + product for product in products]


class _Inputs(NamedTuple):
    """Of the kernel: the vector `x` [K], the gain [K] and eps of a norm before the products, the
    `residual` [all rows] to add to them. None: there is no such step."""

    x: torch.Tensor
    gain: torch.Tensor | None
    eps: float
    residual: torch.Tensor | None


class _Rows(NamedTuple):
    """Of the kernel: a matrix [rows, K], its `weight` and the `others` of its parts; `bias` [rows],
    or anything when there is none."""

    weight: torch.Tensor
    others: tuple[torch.Tensor, ...]
    bias: torch.Tensor
    rows: int


@triton.jit
def _normed(value, gain, inv_rms):
    return normalized(value.to(tl.float32), gain.to(tl.float32), inv_rms, value.dtype)


@triton.jit
def _gemv_kernel(
    inputs,
    matrices,
    out,
    normed,
    fmt,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    OPERAND: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`inputs` (`_Inputs`) and up to three `matrices` (a tuple of `_Rows`) in the format `fmt` give
    `out` [all rows], and the normed vector `normed` [K] unless that is None. A program has ROWS
    rows of one matrix."""
    let_next_start(PDL)
    x = inputs.x
    NORM: tl.constexpr = inputs.gain is not None
    weight, others, bias, rows = matrices[0]
    block, place = tl.program_id(0), 0
    if len(matrices) > 1:  # noqa: SIM102 (one condition is the compiler's)
        if block >= tl.cdiv(rows, ROWS):
            block, place = block - tl.cdiv(rows, ROWS), place + rows
            weight, others, bias, rows = matrices[1]
            if len(matrices) > 2:  # noqa: SIM102
                if block >= tl.cdiv(rows, ROWS):
                    block, place = block - tl.cdiv(rows, ROWS), place + rows
                    weight, others, bias, rows = matrices[2]
    PACKED: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // fmt.bits  # in an element
    COLUMNS: tl.constexpr = WARPS * (TILE_BITS // fmt.bits)
    SLICE: tl.constexpr = TILE_BITS // 8 // fmt.bits
    row = block * ROWS + tl.arange(0, ROWS)
    starts, inside = row.to(tl.int64) * (K // PACKED), row < rows
    of_slices = slice_starts(SLICE, WARPS)
    at = vector_columns(SLICE, WARPS, 16 // (x.dtype.element_ty.primitive_bitwidth // 8))
    sums = no_sums(ROWS, WARPS, TENSOR_CORES)
    shift = tl.zeros((ROWS,), x.dtype.element_ty)
    before, inv_rms = shift, 0.0
    if BIAS:
        shift = tl.load(bias + row, mask=inside, other=0)
    for batch in range(0, K, TILES * COLUMNS):
        tiles, scales, gains, vectors = (), (), (), ()
        for i in tl.static_range(TILES):
            column = (batch + i * COLUMNS) // PACKED + tl.arange(0, COLUMNS // PACKED)
            tiles += (load_tile(weight, starts, inside, column, K // PACKED),)  # type: ignore[assignment]
        for i in tl.static_range(TILES):
            begin = batch + i * COLUMNS + of_slices
            scales += (fmt.scales(others, block * ROWS, row, begin, begin < K, K, ""),)  # type: ignore[assignment]
            if NORM:
                column = batch + i * COLUMNS + at
                gains += (tl.load(inputs.gain + column, mask=column < K, other=0.0),)  # type: ignore[assignment]
        if batch == 0:
            wait_for_inputs(PDL)
            if inputs.residual is not None:
                before = tl.load(inputs.residual + place + row, mask=inside, other=0)
                tl.debug_barrier()  # or the compiler would put this off, it is wanted last
        for i in tl.static_range(TILES):
            column = batch + i * COLUMNS + at
            vectors += (tl.load(x + column, mask=column < K, other=0.0),)  # type: ignore[assignment]
        if NORM:
            if TILES * COLUMNS >= K:
                squares = tl.zeros(at.shape, tl.float32)
                for i in tl.static_range(TILES):
                    squares += vectors[i].to(tl.float32) * vectors[i].to(tl.float32)
                inv_rms = tl.rsqrt(tl.sum(squares) / K + inputs.eps)
            elif batch == 0:
                inv_rms = inverse_rms(x, inputs.eps, K, BLOCK_H)
        for i in tl.static_range(TILES):
            value = _normed(vectors[i], gains[i], inv_rms) if NORM else vectors[i]
            if normed is not None:  # noqa: SIM102 (one condition is the compiler's)
                if tl.program_id(0) == 0:
                    column = batch + i * COLUMNS + at
                    tl.store(normed + column, value, mask=column < K)
            vector, factor = fmt.vector(
                slices_of_vector(value, fmt.bits), OPERAND, weight.dtype.element_ty
            )
            slices = fmt.weights(slices_of_rows(tiles[i], WARPS), scales[i], OPERAND)
            factor = fmt.factor(factor, scales[i])
            sums = add_products(sums, slices, vector, factor, TENSOR_CORES)
    result = row_sums(sums, ROWS, TENSOR_CORES)
    if BIAS:
        result += shift.to(tl.float32)
    result = result.to(out.dtype.element_ty)
    if inputs.residual is not None:
        result = (before.to(tl.float32) + result.to(tl.float32)).to(result.dtype)
    tl.store(out + place + row, result, mask=inside)


def check_linears(
    x: torch.Tensor, matrices: Sequence[Matrix], norm: Norm | None, residual: torch.Tensor | None
) -> None:
    check("x", x, FLOATS, (-1, -1), x.device)
    hidden = x.shape[1]
    if not 1 <= len(matrices) <= MAX_MATRICES:
        raise ValueError(f"{len(matrices)} matrices, expected 1 to {MAX_MATRICES}")
    if len({(matrix.format.name, matrix.bias is None) for matrix in matrices}) > 1:
        names = [matrix.format.name for matrix in matrices]
        raise ValueError(f"matrices of {names}, expected one format, and a bias for all or none")
    for matrix in matrices:
        check_parts(matrix.format, matrix.parts, matrix.rows, hidden, x.device)
        if matrix.bias is not None:
            check("bias", matrix.bias, x.dtype, (matrix.rows,), x.device)
    if norm is not None:
        check("norm.weight", norm.weight, x.dtype, (hidden,), x.device)
    if residual is not None:
        if len(matrices) > 1:
            raise ValueError(f"a residual with {len(matrices)} matrices, expected a single one")
        check("residual", residual, x.dtype, (x.shape[0], matrices[0].rows), x.device)


@verb(linears_reference)
def linears(
    x: torch.Tensor,
    matrices: Sequence[Matrix],
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return `x` [T, in], after the `norm` if there is one, times the transpose of each of up to
    three matrices [out, in], plus its bias, plus `residual` [T, out]: [T, out] in the dtype of x.

    The product is rounded to that dtype before the residual is added. All matrices are stored in
    one format, and either all have a bias or none.
    """
    check_linears(x, matrices, norm, residual)
    if x.shape[0] == 1:
        row = one_token(x, matrices, norm, residual, tiling_of(x, matrices))
        return list(row.split([matrix.rows for matrix in matrices], dim=1))
    h = x if norm is None else rms_norm.launch(x, *norm)
    dense = ((matrix.format.decode(matrix.parts, x.dtype), matrix.bias) for matrix in matrices)
    return _added(residual, [F.linear(h, *each) for each in dense])


def tiling_of(x: torch.Tensor, matrices: Sequence[Matrix]) -> RowTiling:
    """The tiling of `one_token`."""
    row_bytes = x.shape[1] * matrices[0].format.tiles.bits.value // 8
    return linear_tiling(sum(matrix.rows for matrix in matrices), row_bytes, x.device)


def one_token(
    x: torch.Tensor,
    matrices: Sequence[Matrix],
    norm: Norm | None,
    residual: torch.Tensor | None,
    tiling: RowTiling,
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The products of `x` [1, in] one behind the other, [1, sum of out]; norm(x) into `normed`."""
    cols, fmt, biased = x.shape[1], matrices[0].format, matrices[0].bias is not None
    if cols % 16:
        raise ValueError(f"weight has {cols} columns, expected a multiple of 16")
    out = torch.empty((1, sum(m.rows for m in matrices)), dtype=x.dtype, device=x.device)
    _gemv_kernel[(sum(triton.cdiv(m.rows, tiling.rows) for m in matrices),)](
        inputs=_Inputs(x, norm and norm.weight, norm.eps if norm else 0.0, residual),
        matrices=tuple(
            _Rows(fmt.codes(m.parts[0]), m.parts[1:], x if m.bias is None else m.bias, m.rows)
            for m in matrices
        ),
        out=out,
        normed=normed,
        fmt=fmt.tiles,
        K=cols,
        BLOCK_H=triton.next_power_of_2(cols),
        BIAS=biased,
        **gemv_options(fmt, tiling, x),
    )
    return out


def linear(
    x: torch.Tensor,
    matrix: Matrix,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linears` of one matrix."""
    return linears(x, (matrix,), norm, residual)[0]


def normed_linear_reference(
    x: torch.Tensor, norm: Norm, matrix: Matrix, more: Matrix | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    h = rms_norm_reference(x, *norm)
    matrices = (matrix,) if more is None else (matrix, more)
    return h, torch.cat([linear_reference(h, each) for each in matrices], dim=1)


@verb(normed_linear_reference)
def normed_linear(
    x: torch.Tensor, norm: Norm, matrix: Matrix, more: Matrix | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The router, where the normed vector is wanted too: h = norm(x), [T, in], and
    `linear(h, matrix)`; with `more`, its result behind that."""
    matrices = [matrix] if more is None else [matrix, more]
    check_linears(x, matrices, norm, None)
    if x.shape[0] == 1:
        h = torch.empty_like(x)
        # the tiling that `matrix` has by itself, so that `more` does not change a bit of its result
        tiling = tiling_of(x, [matrix])
        return h, one_token(x, matrices, norm, None, tiling, h)
    h = rms_norm.launch(x, *norm)
    return h, torch.cat(linears.launch(h, matrices), dim=1)
