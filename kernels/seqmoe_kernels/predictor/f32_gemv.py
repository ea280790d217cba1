"""The predictor's matrix-vector products: weight rows times a vector in f32.

Every weight is read once, so the speed is that of memory. Each thread takes 16 consecutive bytes of
a row at a time (a chunk), sums inside the chunk, and adds chunks up in a fixed order; the next tile
is on its way meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.dense.norm import normalized
from seqmoe_kernels.dense.tensor_core_gemv import load_tile
from seqmoe_kernels.dense.tiling import num_multiprocessors, padded


class Tiling(NamedTuple):
    """How a product of the predictor is cut into programs and turns of their loop."""

    rows: int  # per program; a power of two, at most 128
    columns: int  # of a tile; a power of two, at least 128
    tiles: int  # per turn, each loaded while the one before it is summed
    num_warps: int


def tiling_for(num_rows: int, cols: int, weight_dtype: torch.dtype, device: torch.device) -> Tiling:
    """As many rows for a program as leave three programs for every multiprocessor. Programs of many
    rows have narrow tiles, those of few wide ones. Depends on shape, dtype and device alone, as in
    `linear_tiling`."""
    rows = 16
    while rows > 2 and num_rows < rows * 3 * num_multiprocessors(device):
        rows //= 2
    if rows == 16:
        return narrow_tiling(rows, cols, weight_dtype)
    return wide_tiling(rows, cols, weight_dtype)


def wide_tiling(rows: int, cols: int, weight_dtype: torch.dtype) -> Tiling:
    """Programs of `rows` rows that have up to 4 KiB of each on its way at once."""
    columns = min(4096 // weight_dtype.itemsize, max(triton.next_power_of_2(cols), 128))
    return Tiling(rows, columns, 2 if cols > columns else 1, 4)


def narrow_tiling(rows: int, cols: int, weight_dtype: torch.dtype) -> Tiling:
    """Programs of `rows` rows that walk through them in tiles of half a KiB of each."""
    widths = [max(width // weight_dtype.itemsize, 128) for width in (512, 256)]
    columns = min(widths, key=lambda width: padded(cols, width))
    tiles = min((4, 3, 2), key=lambda tiles: padded(cols, tiles * columns))
    return Tiling(rows, columns, tiles if cols > columns else 1, 4)


def check_width(width: int) -> None:
    if width % 16:
        raise ValueError(f"the width is {width}, expected a multiple of 16")


@triton.jit
def vector(x, gain, inv_rms, column, K: tl.constexpr, NORM: tl.constexpr):
    """Elements of `x` [K], normalised with NORM: f32."""
    mask = column < K
    value = tl.load(x + column, mask=mask, other=0.0)
    if NORM:
        factor = tl.load(gain + column, mask=mask, other=0.0).to(tl.float32)
        value = normalized(value.to(tl.float32), factor, inv_rms, value.dtype)
    return value.to(tl.float32)


@triton.jit
def chunk_sums(tile, value):
    """Products of weights [rows, chunks, CHUNK] with f32 values [chunks, CHUNK], summed within each
    chunk: f32 [rows, chunks]."""
    return tl.sum(tile.to(tl.float32) * value[None, :, :], axis=2)


@triton.jit
def dot_rows(
    ahead,
    weight,
    starts,
    inside,
    x,
    gain,
    inv_rms,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    NORM: tl.constexpr,
):
    """Multiply rows of a weight with the vector `x` [K]: f32 [rows].

    `starts` [rows] are the rows' element offsets from `weight`, `inside` [rows] masks them; `ahead`
    is their first tile. With NORM the vector is x * `inv_rms` * `gain` [K].
    """
    dtype: tl.constexpr = weight.dtype.element_ty
    CHUNK: tl.constexpr = 128 // dtype.primitive_bitwidth
    column = tl.arange(0, BLOCK_K)
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK
    total = tl.zeros((starts.shape[0], CHUNKS), tl.float32)
    for first in range(0, K, TILES * BLOCK_K):
        for i in tl.static_range(TILES):
            tile, start = ahead, first + i * BLOCK_K
            if i + 1 < TILES or TILES * BLOCK_K < K:
                ahead = load_tile(weight, starts, inside, start + BLOCK_K + column, K)
            value = vector(x, gain, inv_rms, start + column, K, NORM)
            total += chunk_sums(
                tl.reshape(tile, (starts.shape[0], CHUNKS, CHUNK)),
                tl.reshape(value, (CHUNKS, CHUNK)),
            )
    return tl.sum(total, axis=1)
