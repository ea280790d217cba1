"""Decoding a whole weight on a GPU, tile by tile, for a product with many tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.formats import TileFunctions

_ROWS, _COLS = 32, 128


@triton.jit
def _dequantize_kernel(
    weight, others, fmt, out, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Parts of a stored weight (`others`: a tuple) -> `out` [rows, cols]."""
    first_row, first_col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    row, col = first_row + tl.arange(0, ROWS), first_col + tl.arange(0, COLS)
    at = row[:, None].to(tl.int64) * cols + col[None, :]
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    value = fmt.dense(weight, others, at, mask, first_row, first_col, cols)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


def decode_by_tiles(
    fmt: TileFunctions, weight: torch.Tensor, others: tuple[torch.Tensor, ...], out: torch.Tensor
) -> None:
    """Decode `weight` and the `others` of its parts into `out` [rows, cols], any float dtype."""
    rows, cols = out.shape
    _dequantize_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(cols, _COLS))](
        weight=weight,
        others=others,
        fmt=fmt,
        out=out,
        rows=rows,
        cols=cols,
        ROWS=_ROWS,
        COLS=_COLS,
        enable_fp_fusion=True,
    )
