"""How a product of the predictor is cut into programs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

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
