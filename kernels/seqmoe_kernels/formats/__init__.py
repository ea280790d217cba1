"""How weights are stored: one file for each format, found by the name that manifests give it.

A stored weight [rows, cols] consists of parts: the weight itself, then what it takes to read it,
such as scales. A format says what the parts are, decodes them in plain torch, and gives the kernels
the few functions in which they differ from format to format (`TileFunctions`).
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check

_ROWS, _COLS = 32, 128  # of a tile that is decoded

# Dtypes of parts, as safetensors files name them.
TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I64": torch.int64,
}


class Part(NamedTuple):
    """One tensor of a stored weight."""

    suffix: str  # behind the weight's name; "" for the weight itself
    dtype: str  # a key of TORCH_DTYPES
    shape: tuple[int, ...]


class TileFunctions(NamedTuple):
    """What kernels call of a format: functions of Triton, and a constant.

    The kernels for one token load a tile of the first part (R rows of WARPS * COLUMNS weights) and
    cut it into 8 slices of n weights for each of W warps. `vector` and `weights` make the operands
    of the product; the product of a row's slice with the vector's is multiplied by `factor`.
    `others` are pointers to the parts behind the first, one for all slices or one for each [W, 8].
    `scales` may return anything, or several things in a tuple; only the format looks at it.
    """

    bits: tl.constexpr  # of a weight in the first part
    # (others, first, row, begin, inside, K, CACHE): what of the other parts the slices need. `row`
    # [R] from `first` on; `begin` [W, 8] is each slice's first column, `inside` [W, 8] masks it. K
    # columns in all, CACHE is the cache modifier of loads.
    scales: Any
    # (even, odd, is_odd): scales of rows that are in turn of two weights, `is_odd` [1, R, 1].
    joined: Any
    # (rows, scales, OPERAND): a tile's elements as stored, [W, R * 8, n * bits / bits of an
    # element] in the order of `slices_of_rows`, as values of OPERAND [W, R * 8, n].
    weights: Any
    # (rows, OPERAND, STORED): slices of the vector [W, 8, n] as OPERAND, and f32 [W, 8] by which
    # they have become too small. STORED is the dtype of the first part's elements.
    vector: Any
    # (by, scales): f32 `by` [W, 8] times the factor of each slice: [W, R, 8] or [W, 1, 8].
    factor: Any
    # (weight, others, row, column, rows, cols, ROWS, COLS): f32 [ROWS, COLS] from there on, zero
    # past `rows` and `cols`. ROWS divides COLS, COLS divides 128, both divide `row` and `column`.
    dense: Any


class Format(ABC):
    """A way to store weights."""

    name: str  # as manifests spell it
    tiles: TileFunctions

    @abstractmethod
    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        """What a weight [rows, cols] consists of, the weight itself first. The first dimension of
        that is `rows`."""

    @abstractmethod
    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The weight [rows, cols], each value rounded once to `dtype` (F32, BF16 or F16)."""

    @abstractmethod
    def encode(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of a finite `weight` [rows, cols]."""

    @abstractmethod
    def operand(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype weights are multiplied with one token's vector of `dtype`. Products of
        16-bit dtypes are made by tensor cores."""

    def codes(self, weight: torch.Tensor) -> torch.Tensor:
        """The first part as kernels on its device want to see it: another dtype of the same size,
        perhaps."""
        return weight


_formats: dict[str, Format] = {}


def register(fmt: Format) -> None:
    """Make a format known that is no file of this folder. A name has one format."""
    format_names()  # those of this folder come first
    _add(fmt)


def _add(fmt: Format) -> None:
    if _formats.setdefault(fmt.name, fmt) is not fmt:
        raise ValueError(f"there is a format {fmt.name} already")


def format_names() -> list[str]:
    """The names of all formats, sorted."""
    for module in pkgutil.iter_modules(__path__):
        file = importlib.import_module(f"{__name__}.{module.name}")
        for fmt in getattr(file, "FORMATS", ()):
            _add(fmt)
    return sorted(_formats)


def find_format(name: str) -> Format:
    """The format of this name. Raises ValueError when there is none."""
    if name not in _formats and name not in format_names():
        raise ValueError(f"no format is called {name}, there are {', '.join(sorted(_formats))}")
    return _formats[name]


def format_of(weight: torch.Tensor) -> Format:
    """The format whose first part has this tensor's dtype and gives its name to the format."""
    names = (name for name, dtype in TORCH_DTYPES.items() if dtype == weight.dtype)
    return find_format(next(names, str(weight.dtype)))


def check_parts(
    fmt: Format, parts: Sequence[torch.Tensor], rows: int, cols: int, device: torch.device
) -> None:
    """Raise ValueError unless these are the parts of a weight [rows, cols] on `device`."""
    expected = fmt.parts(rows, cols)
    if len(parts) != len(expected):
        raise ValueError(f"a {fmt.name} weight has {len(parts)} parts, expected {len(expected)}")
    for part, tensor in zip(expected, parts, strict=True):
        dtype = TORCH_DTYPES[part.dtype]
        check(f"weight{part.suffix}", tensor, dtype, part.shape, device)


@triton.jit
def _dequantize_kernel(
    weight, others, fmt, out, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Parts of a stored weight (`others`: a tuple) -> `out` [rows, cols]."""
    first_row, first_col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    value = fmt.dense(weight, others, first_row, first_col, rows, cols, ROWS, COLS)
    row, col = first_row + tl.arange(0, ROWS), first_col + tl.arange(0, COLS)
    at = row[:, None].to(tl.int64) * cols + col[None, :]
    mask = (row < rows)[:, None] & (col < cols)[None, :]
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
