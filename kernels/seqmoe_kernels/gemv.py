"""Linear layers whose weights may be FP8: a matrix-vector kernel for one token.

A matrix-vector product reads every weight once, so its speed is that of memory. Each thread takes
16 consecutive bytes of a row at a time (a chunk), sums inside the chunk, multiplies by the scale of
the chunk's block, and adds chunks up in a fixed order; the next tile is on its way meanwhile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from seqmoe_kernels.checks import FLOATS, check, check_kernel_device
from seqmoe_kernels.fp8 import BLOCK, decode_biased, dequantize, dequantize_reference, num_blocks

_BLOCK = tl.constexpr(BLOCK)
# The 2^120 that `decode_biased` leaves out, in two factors that neither overflow nor underflow.
_UNBIAS_INPUT = tl.constexpr(2.0**64)
_UNBIAS_SCALE = tl.constexpr(2.0**56)


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if scale is None:
        return F.linear(x, weight, bias)
    wide = F.linear(x.float(), dequantize_reference(weight, scale, torch.float32))
    return (wide if bias is None else wide + bias).to(x.dtype)


@triton.jit
def _load_tile(weight, starts, inside, column, K: tl.constexpr):
    mask = inside[:, None] & (column < K)[None, :]
    return tl.load(weight + starts[:, None] + column[None, :], mask=mask, other=0)


@triton.jit
def _chunk_sums(tile, x, column, K: tl.constexpr, CHUNK: tl.constexpr):
    value = tl.load(x + column, mask=column < K, other=0).to(tl.float32)
    if tile.dtype == tl.int8:
        product = decode_biased(tile) * (value * _UNBIAS_INPUT)[None, :]
    else:
        product = tile.to(tl.float32) * value[None, :]
    return tl.sum(tl.reshape(product, (tile.shape[0], tile.shape[1] // CHUNK, CHUNK)), axis=2)


@triton.jit
def _chunk_scales(scale, at, K: tl.constexpr):
    return tl.load(scale + at // _BLOCK, mask=at < K, other=0) * _UNBIAS_SCALE


@triton.jit
def block_row(row, K: tl.constexpr):
    """The offset of the scales of row `row` of a weight with K columns."""
    return row // _BLOCK * tl.cdiv(K, _BLOCK)


@triton.jit
def dot_rows(
    weight,
    starts,
    inside,
    x,
    scale,
    odd_scale,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
):
    """Multiply rows of a weight with the vector `x` [K]: f32 [rows].

    `starts` [rows] are the rows' element offsets from `weight`, `inside` [rows] masks them. Int8
    weights are FP8 codes: even rows take their scales at `scale`, odd ones at `odd_scale`.
    """
    CHUNK: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth
    odd = tl.arange(0, starts.shape[0]) % 2 == 1
    column = tl.arange(0, BLOCK_K)
    chunk_start = tl.arange(0, BLOCK_K // CHUNK) * CHUNK
    total = tl.zeros((starts.shape[0], BLOCK_K // CHUNK), tl.float32)
    for first in range(0, K, TILES * BLOCK_K):
        ahead = _load_tile(weight, starts, inside, first + column, K)
        for i in tl.static_range(TILES):
            tile, start = ahead, first + i * BLOCK_K
            if i + 1 < TILES:
                ahead = _load_tile(weight, starts, inside, start + BLOCK_K + column, K)
            part = _chunk_sums(tile, x, start + column, K, CHUNK)
            if weight.dtype.element_ty == tl.int8:
                even_scales = _chunk_scales(scale, start + chunk_start, K)
                odd_scales = _chunk_scales(odd_scale, start + chunk_start, K)
                part *= tl.where(odd[:, None], odd_scales[None, :], even_scales[None, :])
            total += part
    return tl.sum(total, axis=1)


@triton.jit
def _gemv_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    num_rows,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    BIAS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    inside = row < num_rows
    scales = scale + block_row(first, K)
    starts = row.to(tl.int64) * K
    result = dot_rows(weight, starts, inside, x, scales, scales, K, BLOCK_K, TILES)
    if BIAS:
        result += tl.load(bias + row, mask=inside, other=0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


class Tiling(NamedTuple):
    """How a matrix-vector product is cut into programs and turns of their loop."""

    rows: int  # per program; a power of two, at most 128
    columns: int  # of a tile; a power of two, at least 128
    tiles: int  # per turn, each loaded while the one before it is summed
    num_warps: int


def tiling_for(num_rows: int, cols: int, weight_dtype: torch.dtype, device: torch.device) -> Tiling:
    """A warp reads up to 512 bytes of a row at once; a program has as many rows as leave two
    programs for every multiprocessor. Depends on shape, dtype and device alone, never on data or
    on the pool: another tiling may round a sum differently."""
    widths = [max(width // weight_dtype.itemsize, 128) for width in (512, 256)]
    columns = min(widths, key=lambda width: _padded(cols, width))
    tiles = min((4, 3, 2), key=lambda tiles: _padded(cols, tiles * columns))
    rows = 16
    while rows > 2 and num_rows < rows * 2 * _num_multiprocessors(device):
        rows //= 2
    return Tiling(rows, columns, tiles if cols > columns else 1, min(4, max(1, rows // 4)))


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter runs one program after the other
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def check_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    check("x", x, FLOATS, (-1, -1), x.device)
    dtype = x.dtype if scale is None else torch.float8_e4m3fn
    check("weight", weight, dtype, (-1, x.shape[1]), x.device)
    rows, cols = weight.shape
    if scale is not None:
        check("scale", scale, torch.float32, num_blocks(rows, cols), x.device)
    if bias is not None:
        check("bias", bias, x.dtype, (rows,), x.device)


def linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    check_kernel_device(x)
    check_linear(x, weight, scale, bias)
    if x.shape[0] != 1:
        plain = weight if scale is None else dequantize(weight, scale, x.dtype)
        return F.linear(x, plain, bias)
    rows, cols = weight.shape
    if cols % 16:
        raise ValueError(f"weight has {cols} columns, expected a multiple of 16")
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    tiling = tiling or tiling_for(rows, cols, weight.dtype, x.device)
    _gemv_kernel[(triton.cdiv(rows, tiling.rows),)](
        x,
        weight if scale is None else weight.view(torch.int8),
        weight if scale is None else scale,  # any pointer: plain weights have no scales
        bias,
        out,
        rows,
        cols,
        tiling.rows,
        tiling.columns,
        tiling.tiles,
        bias is not None,
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
    )
    return out


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x` [T, in] times the transpose of `weight` [out, in] plus `bias` [out].

    The result has the dtype of `x`. So has `weight`, or it is float8_e4m3fn with `scale` f32
    [out/128, in/128] (rounded up), by which its 128x128 blocks are multiplied.
    """
    return (linear_triton if x.is_cuda else linear_reference)(x, weight, scale, bias)
