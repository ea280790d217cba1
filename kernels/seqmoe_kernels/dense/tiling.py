"""How a matrix-vector product is cut into programs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Tiling(NamedTuple):
    """How a product of the predictor is cut into programs and turns of their loop."""

    rows: int  # per program; a power of two, at most 128
    columns: int  # of a tile; a power of two, at least 128
    tiles: int  # per turn, each loaded while the one before it is summed
    num_warps: int


class RowTiling(NamedTuple):
    """How products on tensor cores are cut into programs; a tile takes 512 bytes of each row for a
    warp."""

    rows: int  # per program, a power of two from 2 to 128; of gate and of up
    tiles: int  # on their way at once
    num_warps: int  # which share the columns


def linear_tiling(
    num_rows: int, cols: int, weight_dtype: torch.dtype, device: torch.device
) -> RowTiling:
    """16 KiB for a program and on their way at once, less if that leaves fewer than three programs
    for a multiprocessor; two rows at least. Depends on shape, dtype and device alone, never on data
    or on the pool: another tiling may round a sum differently."""
    row_bytes, rows = cols * weight_dtype.itemsize, 8
    while rows > 2 and (
        rows * row_bytes > 2**14 or num_rows < rows * 3 * _num_multiprocessors(device)
    ):
        rows //= 2
    count = -(-row_bytes // (4 * 512))
    num_batches = -(-count * rows // 8)
    return RowTiling(rows, -(-count // num_batches), 4)


def gate_up_tiling(hidden: int, weight_dtype: torch.dtype) -> RowTiling:
    """16 KiB for a program."""
    return _row_tiling(hidden * weight_dtype.itemsize, range(1, 9), 2**13, 2)


def down_tiling(length: int, weight_dtype: torch.dtype) -> RowTiling:
    """48 KiB for a program, but two rows at least: a tensor core takes no fewer."""
    return _row_tiling(length * weight_dtype.itemsize, range(2, 9), 3 * 2**14, 3)


def _row_tiling(row_bytes: int, rows: range, most_bytes: int, most_tiles: int) -> RowTiling:
    """As many rows as go into `most_bytes`, a power of two; as many tiles of them on their way as
    leave the smallest rest."""
    fitting = [
        n for n in rows if n & (n - 1) == 0 and (n == rows.start or n * row_bytes <= most_bytes)
    ]
    count = -(-row_bytes // (4 * 512))
    tiles = min(range(min(most_tiles, count), 0, -1), key=lambda tiles: _padded(count, tiles))
    return RowTiling(fitting[-1], tiles, 4)


def tiling_for(num_rows: int, cols: int, weight_dtype: torch.dtype, device: torch.device) -> Tiling:
    """As many rows for a program as leave three programs for every multiprocessor. Programs of many
    rows walk through them in narrow tiles, those of few have up to 4 KiB of each on its way
    at once. Depends on shape, dtype and device alone, as in `linear_tiling`."""
    rows = 16
    while rows > 2 and num_rows < rows * 3 * _num_multiprocessors(device):
        rows //= 2
    if rows == 16:
        return narrow_tiling(rows, cols, weight_dtype)
    columns = min(4096 // weight_dtype.itemsize, max(_next_power_of_2(cols), 128))
    return Tiling(rows, columns, 2 if cols > columns else 1, 4)


def narrow_tiling(rows: int, cols: int, weight_dtype: torch.dtype) -> Tiling:
    """Programs of `rows` rows that walk through them in tiles of half a KiB of each."""
    widths = [max(width // weight_dtype.itemsize, 128) for width in (512, 256)]
    columns = min(widths, key=lambda width: _padded(cols, width))
    tiles = min((4, 3, 2), key=lambda tiles: _padded(cols, tiles * columns))
    return Tiling(rows, columns, tiles if cols > columns else 1, 4)


def _next_power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter runs one program after the other
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
