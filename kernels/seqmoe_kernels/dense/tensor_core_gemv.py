"""Parts of the kernels of experts and linear layers: weight rows times a vector, on tensor cores.

A tensor core wants a matrix on both sides. So the COLUMNS of a row that a warp takes at a time, 16
bytes for each lane, are cut into 8 slices, which make 8 rows of one operand; the vector's 8 slices
are the 8 columns of the other. An eighth of that product is wanted, a row's slice times the same
slice of the vector, but it takes one instruction for 256 weights, and no lane needs what another
has loaded. The warps of a program share the columns of its rows.

How weights are stored is the format's: `fmt` is its `TileFunctions`. Sums are f32. Vectors of f32
are multiplied without tensor cores.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.launch import pdl_options
from seqmoe_kernels.dense.tiling import RowTiling
from seqmoe_kernels.formats import Format

_SLICES = tl.constexpr(8)
TILE_BITS = tl.constexpr(32 * 128)  # of a row in a tile: COLUMNS weights


def operand_dtype(dtype: torch.dtype) -> tl.dtype:
    """In Triton; the interpreter multiplies bfloat16 as float32."""
    if dtype == torch.float16:
        return tl.float16
    bf16 = dtype == torch.bfloat16 and not triton.knobs.runtime.interpret
    return tl.bfloat16 if bf16 else tl.float32


def gemv_options(fmt: Format, tiling: RowTiling, vector: torch.Tensor) -> dict[str, Any]:
    """Arguments of a kernel: the tiling, as what weights and elements of `vector` are multiplied
    and where, the device."""
    operand = fmt.operand(vector.dtype)
    return {
        "ROWS": tiling.rows,
        "TILES": tiling.tiles,
        "WARPS": tiling.num_warps,
        "OPERAND": operand_dtype(operand),
        "TENSOR_CORES": operand != torch.float32,
        "num_warps": tiling.num_warps,
        "num_stages": 1,  # nothing is to be read ahead of `wait_for_inputs`
        "enable_fp_fusion": True,
        **pdl_options(vector.device),
    }


@triton.jit
def load_tile(weight, starts, inside, column, K: tl.constexpr):
    """Columns of rows that begin at element `starts` [rows]; zero where not `inside` or past K."""
    mask = inside[:, None] & (column < K)[None, :]
    return tl.load(
        weight + starts[:, None] + column[None, :], mask=mask, other=0.0, cache_modifier=".cg"
    )


@triton.jit
def slices_of_rows(tile, WARPS: tl.constexpr):
    """A tile as stored [ROWS, WARPS * n] as slices [WARPS, ROWS * 8, n / 8], with columns in the
    order of `vector_columns`: 32 bits of each quarter of the slice in turn."""
    ROWS: tl.constexpr = tile.shape[0]
    LENGTH: tl.constexpr = tile.shape[1] // WARPS // _SLICES
    RUN: tl.constexpr = 32 // tile.dtype.primitive_bitwidth  # what a lane gives to an instruction
    rows = tl.reshape(tile, (ROWS, WARPS, _SLICES, 4, LENGTH // 4 // RUN, RUN))
    rows = tl.permute(rows, (1, 0, 2, 4, 3, 5))
    return tl.reshape(rows, (WARPS, ROWS * _SLICES, LENGTH))


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
def slices_of_vector(value, BITS: tl.constexpr):
    """Elements of a vector at `vector_columns` as slices [WARPS, 8, LENGTH], in the order of
    weights of BITS."""
    WARPS: tl.constexpr = value.shape[2]
    LENGTH: tl.constexpr = 4 * value.shape[3] * value.shape[4]
    RUN: tl.constexpr = 32 // BITS
    rows = tl.reshape(value, (4, _SLICES, WARPS, LENGTH // 4 // RUN, RUN))
    return tl.reshape(tl.permute(rows, (2, 1, 3, 0, 4)), (WARPS, _SLICES, LENGTH))


@triton.jit
def no_sums(ROWS: tl.constexpr, WARPS: tl.constexpr, TENSOR_CORES: tl.constexpr):
    """What `add_products` adds to."""
    return tl.zeros((WARPS, ROWS * _SLICES, _SLICES if TENSOR_CORES else 1), tl.float32)


@triton.jit
def add_products(sums, rows, vector, factor, TENSOR_CORES: tl.constexpr):
    """Slices of rows [WARPS, ROWS * 8, n] times slices of a vector [WARPS, 8, n], times the
    `factor` [WARPS, ROWS (or 1), 8] of each row's slices, added to `sums`."""
    WARPS: tl.constexpr = rows.shape[0]
    ROWS: tl.constexpr = rows.shape[1] // _SLICES
    factor = tl.broadcast_to(factor, (WARPS, ROWS, _SLICES))
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
