"""Parts of the kernels of experts and linear layers: weight rows times a vector, on tensor cores.

A tensor core wants a matrix on both sides. So the COLUMNS of a row that a warp takes at a time, 16
bytes for each lane, are cut into 8 slices, which make 8 rows of one operand; the vector's 8 slices
are the 8 columns of the other. An eighth of that product is wanted, a row's slice times the same
slice of the vector, but it takes one instruction for 256 weights, and no lane needs what another
has loaded. The warps of a program share the columns of its rows.

FP8 weights and 16-bit vectors meet as f16: the codes fit exactly, and the vector does once each
slice of it is brought near to 1 by a power of two (what is then below 2^-39 of a slice's largest is
lost). Sums are f32. Vectors of f32 are multiplied without tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.formats.fp8_block import BLOCK, decode_half

_BLOCK = tl.constexpr(BLOCK)
_SLICES = tl.constexpr(8)
TILE_BITS = tl.constexpr(32 * 128)  # of a row in a tile: COLUMNS weights


def operand_of(weights: torch.Tensor, x: torch.Tensor) -> tl.dtype:
    """As what weights and elements of `x` are multiplied. The interpreter has no bfloat16."""
    if x.dtype == torch.float32 or weights.dtype == torch.float32:
        return tl.float32
    if weights.dtype.itemsize == 1 or weights.dtype == x.dtype == torch.float16:
        return tl.float16
    return tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16


def on_tensor_cores(weights: torch.Tensor, x: torch.Tensor) -> bool:
    return x.dtype != torch.float32 and weights.dtype != torch.float32


@triton.jit
def slices_of_rows(tile, OPERAND: tl.constexpr, WARPS: tl.constexpr):
    """A tile [ROWS, WARPS * COLUMNS] as slices [WARPS, ROWS * 8, COLUMNS / 8], with columns in the
    order of `vector_columns`."""
    ROWS: tl.constexpr = tile.shape[0]
    LENGTH: tl.constexpr = tile.shape[1] // WARPS // _SLICES
    RUN: tl.constexpr = 32 // tile.dtype.primitive_bitwidth  # what a lane gives to an instruction
    rows = tl.reshape(tile, (ROWS, WARPS, _SLICES, 4, LENGTH // 4 // RUN, RUN))
    rows = tl.permute(rows, (1, 0, 2, 4, 3, 5))
    rows = tl.reshape(rows, (WARPS, ROWS * _SLICES, LENGTH))
    if rows.dtype == tl.int8:
        return decode_half(rows).to(OPERAND)
    else:
        return rows.to(OPERAND)


@triton.jit
def vector_columns(LENGTH: tl.constexpr, WARPS: tl.constexpr, CHUNK: tl.constexpr):
    """The columns of 8 slices of LENGTH for each warp, in the order in which lanes want them, CHUNK
    of a vector at a time."""
    lane_in_4 = tl.arange(0, 4)[:, None, None, None, None]
    slice_ = tl.arange(0, _SLICES)[None, :, None, None, None]
    warp = tl.arange(0, WARPS)[None, None, :, None, None]
    part = tl.arange(0, LENGTH // 4 // CHUNK)[None, None, None, :, None]
    run = tl.arange(0, CHUNK)[None, None, None, None, :]
    return (warp * _SLICES + slice_) * LENGTH + lane_in_4 * (LENGTH // 4) + part * CHUNK + run


@triton.jit
def slice_starts(LENGTH: tl.constexpr, WARPS: tl.constexpr):
    """The first column of each slice [WARPS, 8]."""
    return (tl.arange(0, WARPS)[:, None] * _SLICES + tl.arange(0, _SLICES)[None, :]) * LENGTH


@triton.jit
def slices_of_vector(value, OPERAND: tl.constexpr, WEIGHTS: tl.constexpr):
    """Elements of a vector at `vector_columns` as slices [WARPS, 8, LENGTH] for weights of dtype
    WEIGHTS, and the factor of each slice [WARPS, 8] by which its products are too small."""
    WARPS: tl.constexpr = value.shape[2]
    LENGTH: tl.constexpr = 4 * value.shape[3] * value.shape[4]
    RUN: tl.constexpr = 32 // WEIGHTS.primitive_bitwidth
    rows = tl.reshape(value, (4, _SLICES, WARPS, LENGTH // 4 // RUN, RUN))
    rows = tl.reshape(tl.permute(rows, (2, 1, 3, 0, 4)), (WARPS, _SLICES, LENGTH))
    factor = tl.full((WARPS, _SLICES), 1.0, tl.float32)
    if WEIGHTS.primitive_bitwidth == 8:
        wide = rows.to(tl.float32)
        shrink, factor = _to_unity(tl.max(tl.abs(wide), 2))
        rows = wide * shrink[:, :, None]
        if WEIGHTS.is_int8():  # see `decode_half`
            factor *= 256.0
    return rows.to(OPERAND), factor


@triton.jit
def _to_unity(peak):
    """A power of two that brings `peak` (f32, at least 0) below 2^15, most to 2^14, and its
    inverse."""
    exponent = peak.to(tl.int32, bitcast=True) >> 23
    shrink = tl.minimum(268 - exponent, 253) << 23
    grow = tl.maximum(exponent - 14, 1) << 23
    return shrink.to(tl.float32, bitcast=True), grow.to(tl.float32, bitcast=True)


@triton.jit
def no_sums(ROWS: tl.constexpr, WARPS: tl.constexpr, TENSOR_CORES: tl.constexpr):
    """What `add_products` adds to."""
    return tl.zeros((WARPS, ROWS * _SLICES, _SLICES if TENSOR_CORES else 1), tl.float32)


@triton.jit
def add_products(sums, rows, vector, factor, TENSOR_CORES: tl.constexpr):
    """Slices of rows [WARPS, ROWS * 8, n] times slices of a vector [WARPS, 8, n], times the
    `factor` [WARPS, ROWS, 8] of each row's slices, added to `sums`."""
    WARPS: tl.constexpr = factor.shape[0]
    ROWS: tl.constexpr = factor.shape[1]
    factor = tl.reshape(factor, (WARPS, ROWS * _SLICES, 1))
    if TENSOR_CORES:
        part = tl.dot(rows, tl.permute(vector, (0, 2, 1)), input_precision="ieee")
    else:
        each = tl.reshape(rows, (WARPS, ROWS, _SLICES, rows.shape[2])) * vector[:, None, :, :]
        part = tl.reshape(tl.sum(each, 3), (WARPS, ROWS * _SLICES, 1))
    return sums + part * factor


@triton.jit
def row_sums(sums, ROWS: tl.constexpr, TENSOR_CORES: tl.constexpr):
    """The rows' products with the whole vector: f32 [ROWS]."""
    if TENSOR_CORES:
        row, column = tl.arange(0, ROWS * _SLICES) % _SLICES, tl.arange(0, _SLICES)
        sums = tl.where(row[None, :, None] == column[None, None, :], sums, 0.0)
    sums = tl.reshape(sums, (sums.shape[0], ROWS, _SLICES * sums.shape[2]))
    return tl.sum(tl.sum(sums, 2), 0)
