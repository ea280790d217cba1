"""Weights as they are: BF16, F16, F32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from seqmoe_kernels.formats import TORCH_DTYPES, Format, Part, TileFunctions


@triton.jit
def _scales(others, first, row, begin, inside, K: tl.constexpr, CACHE: tl.constexpr):
    return 0


@triton.jit
def _joined(even, odd, is_odd):
    return 0


@triton.jit
def _weights(rows, scales, OPERAND: tl.constexpr):
    return rows.to(OPERAND)


@triton.jit
def _vector(rows, OPERAND: tl.constexpr, STORED: tl.constexpr):
    return rows.to(OPERAND), tl.full((rows.shape[0], rows.shape[1]), 1.0, tl.float32)


@triton.jit
def _factor(by, scales):
    return by[:, None, :]


@triton.jit
def _dense(weight, others, row, column, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, column = row + tl.arange(0, ROWS), column + tl.arange(0, COLS)
    mask = (row < rows)[:, None] & (column < cols)[None, :]
    at = row[:, None].to(tl.int64) * cols + column[None, :]
    return tl.load(weight + at, mask=mask, other=0).to(tl.float32)


class Plain(Format):
    """One part, in the dtype that gives the format its name."""

    def __init__(self, name: str) -> None:
        self.name, self.dtype = name, TORCH_DTYPES[name]
        bits = tl.constexpr(8 * self.dtype.itemsize)
        self.tiles = TileFunctions(bits, _scales, _joined, _weights, _vector, _factor, _dense)

    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        return (Part("", self.name, (rows, cols)),)

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return parts[0].to(dtype)

    def encode(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (weight.to(self.dtype),)

    def operand(self, dtype: torch.dtype) -> torch.dtype:
        if torch.float32 in (dtype, self.dtype):
            return torch.float32
        return dtype if dtype == self.dtype else torch.bfloat16


FORMATS = tuple(map(Plain, ("BF16", "F16", "F32")))
