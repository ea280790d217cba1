"""How a matrix-vector product on tensor cores is cut into programs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class RowTiling(NamedTuple):
    """How products on tensor cores are cut into programs; a tile takes 512 bytes of each row for a
    warp."""

    rows: int  # per program, a power of two from 2 to 128; of gate and of up
    tiles: int  # on their way at once
    num_warps: int  # which share the columns


def linear_tiling(num_rows: int, row_bytes: int, device: torch.device) -> RowTiling:
    """16 KiB for a program and on their way at once, less if that leaves fewer than three programs
    for a multiprocessor; two rows at least. Depends on shape, format and device alone, never on
    data or on the pool: another tiling may round a sum differently."""
    rows = 8
    while rows > 2 and (
        rows * row_bytes > 2**14 or num_rows < rows * 3 * num_multiprocessors(device)
    ):
        rows //= 2
    count = -(-row_bytes // (4 * 512))
    num_batches = -(-count * rows // 8)
    return RowTiling(rows, -(-count // num_batches), 4)


def gate_up_tiling(row_bytes: int) -> RowTiling:
    """16 KiB for a program."""
    return _row_tiling(row_bytes, range(1, 9), 2**13, 2)


def down_tiling(row_bytes: int) -> RowTiling:
    """48 KiB for a program, but two rows at least: a tensor core takes no fewer."""
    return _row_tiling(row_bytes, range(2, 9), 3 * 2**14, 3)


def _row_tiling(row_bytes: int, rows: range, most_bytes: int, most_tiles: int) -> RowTiling:
    """As many rows as go into `most_bytes`, a power of two; as many tiles of them on their way as
    leave the smallest rest."""
    fitting = [
        n for n in rows if n & (n - 1) == 0 and (n == rows.start or n * row_bytes <= most_bytes)
    ]
    count = -(-row_bytes // (4 * 512))
    tiles = min(range(min(most_tiles, count), 0, -1), key=lambda tiles: padded(count, tiles))
    return RowTiling(fitting[-1], tiles, 4)


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter runs one program after the other
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
