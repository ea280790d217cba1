"""Parts of matrix-vector kernels: rows of a weight that may be FP8, times a vector.

A matrix-vector product reads every weight once, so its speed is that of memory. Each thread takes
16 consecutive bytes of a row at a time (a chunk), sums inside the chunk, multiplies by the scale of
the chunk's block, and adds chunks up in a fixed order; the next tile is on its way meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seqmoe_kernels.fp8 import BLOCK, decode_biased
from seqmoe_kernels.norm import normalized

_BLOCK = tl.constexpr(BLOCK)
# The 2^120 that `decode_biased` leaves out, in two factors that neither overflow nor underflow.
_UNBIAS_INPUT = tl.constexpr(2.0**64)
_UNBIAS_SCALE = tl.constexpr(2.0**56)


@triton.jit
def load_tile(weight, starts, inside, column, K: tl.constexpr):
    """Columns of rows that begin at element `starts` [rows]; zero where not `inside` or past K."""
    mask = inside[:, None] & (column < K)[None, :]
    return tl.load(
        weight + starts[:, None] + column[None, :], mask=mask, other=0.0, cache_modifier=".cg"
    )


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
    chunk: f32 [rows, chunks]. FP8 codes (int8) still want `unbiased` scales."""
    if tile.dtype == tl.int8:
        product = decode_biased(tile) * (value * _UNBIAS_INPUT)[None, :, :]
    else:
        product = tile.to(tl.float32) * value[None, :, :]
    return tl.sum(product, axis=2)


@triton.jit
def unbiased(scale, dtype: tl.constexpr):
    """The scales that sums over weights of this dtype are to be multiplied with."""
    return scale * _UNBIAS_SCALE if dtype == tl.int8 else scale


@triton.jit
def block_row(row, K: tl.constexpr):
    """The offset of the scales of row `row` of a weight with K columns."""
    return row // _BLOCK * tl.cdiv(K, _BLOCK)


@triton.jit
def dot_rows(
    ahead,
    weight,
    starts,
    inside,
    x,
    gain,
    inv_rms,
    scale,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    NORM: tl.constexpr,
):
    """Multiply rows of a weight with the vector `x` [K]: f32 [rows].

    `starts` [rows] are the rows' element offsets from `weight`, `inside` [rows] masks them; `ahead`
    is their first tile. One-byte weights have scales at `scale`, the same for all of the rows. With
    NORM the vector is x * `inv_rms` * `gain` [K].
    """
    dtype: tl.constexpr = weight.dtype.element_ty
    CHUNK: tl.constexpr = 128 // dtype.primitive_bitwidth
    column = tl.arange(0, BLOCK_K)
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK
    chunk_start = tl.arange(0, CHUNKS) * CHUNK
    total = tl.zeros((starts.shape[0], CHUNKS), tl.float32)
    for first in range(0, K, TILES * BLOCK_K):
        for i in tl.static_range(TILES):
            tile, start = ahead, first + i * BLOCK_K
            if i + 1 < TILES or TILES * BLOCK_K < K:
                ahead = load_tile(weight, starts, inside, start + BLOCK_K + column, K)
            value = vector(x, gain, inv_rms, start + column, K, NORM)
            part = chunk_sums(
                tl.reshape(tile, (starts.shape[0], CHUNKS, CHUNK)),
                tl.reshape(value, (CHUNKS, CHUNK)),
            )
            if dtype.primitive_bitwidth == 8:
                at = start + chunk_start
                factor = tl.load(scale + at // _BLOCK, mask=at < K, other=0.0)
                part *= unbiased(factor, dtype)[None, :]
            total += part
    return tl.sum(total, axis=1)
