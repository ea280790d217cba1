"""How a matrix-vector product is cut into programs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


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
