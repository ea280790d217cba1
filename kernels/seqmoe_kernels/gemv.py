"""Linear layers whose weights may be FP8: a matrix-vector kernel for one token.

A matrix-vector product reads every weight once, so its speed is that of memory. The kernel gives
each thread 16 consecutive bytes of a row (a chunk of V weights), sums a chunk inside the thread,
multiplies by the scale of the chunk's block, and adds up chunks in a fixed order.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from seqmoe_kernels.checks import FLOATS, check, check_kernel_device
from seqmoe_kernels.fp8 import BLOCK, decode_biased, dequantize, dequantize_reference, num_blocks

_BLOCK = tl.constexpr(BLOCK)
# The 2^120 that `decode_biased` leaves out, in two factors that neither overflow nor underflow.
_UNBIAS_INPUT = tl.constexpr(2.0**64)
_UNBIAS_SCALE = tl.constexpr(2.0**56)


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if scale is None:
        return F.linear(x, weight, bias)
    wide = F.linear(x.float(), dequantize_reference(weight, scale, torch.float32))
    return (wide if bias is None else wide + bias).to(x.dtype)


@triton.jit
def chunk_sums(
    weight, row_starts, inside, x, chunk, K: tl.constexpr, V: tl.constexpr, FP8: tl.constexpr
):
    """Multiply chunks of rows with chunks of `x` and sum inside each: f32 [rows, chunks].

    `row_starts` [rows] are element offsets from `weight`, `chunk` [chunks] counts V elements;
    `inside` [rows] masks rows. FP8 sums lack the factor `_UNBIAS_SCALE` and the block's scale.
    """
    column = chunk[:, None] * V + tl.arange(0, V)[None, :]
    mask = inside[:, None, None] & (chunk * V < K)[None, :, None]
    at = row_starts[:, None, None] + column[None, :, :]
    w = tl.load(weight + at, mask=mask, other=0)
    value = tl.load(x + column, mask=(chunk * V < K)[:, None], other=0).to(tl.float32)
    if FP8:
        value = value * _UNBIAS_INPUT
        return tl.sum(decode_biased(w) * value[None, :, :], axis=2)
    else:
        return tl.sum(w.to(tl.float32) * value[None, :, :], axis=2)


@triton.jit
def chunk_scales(scale, row, chunk, K: tl.constexpr, V: tl.constexpr):
    """Load the scale of each chunk of row `row` (a scalar), with the factor left out above."""
    at = row // _BLOCK * tl.cdiv(K, _BLOCK) + chunk * V // _BLOCK
    return tl.load(scale + at, mask=chunk * V < K, other=0) * _UNBIAS_SCALE


@triton.jit
def _gemv_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    num_rows,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8: tl.constexpr,
    BIAS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    inside = row < num_rows
    total = tl.zeros((ROWS, BLOCK_K // V), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        chunk = start // V + tl.arange(0, BLOCK_K // V)
        part = chunk_sums(weight, row.to(tl.int64) * K, inside, x, chunk, K, V, FP8)
        if FP8:
            part *= chunk_scales(scale, first, chunk, K, V)[None, :]
        total += part
    result = tl.sum(total, axis=1)
    if BIAS:
        result += tl.load(bias + row, mask=inside, other=0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


def chunk_size(weight_dtype: torch.dtype) -> int:
    """Weights in the 16 bytes that one thread loads at once."""
    return 16 // weight_dtype.itemsize


def tile_columns(cols: int, weight_dtype: torch.dtype) -> int:
    """The widest tile of a row among those that pad `cols` least."""
    widths = [2048, 1024, 512, 256, 128]
    if weight_dtype.itemsize > 1:
        widths = widths[1:]
    return min(widths, key=lambda width: -(-cols // width) * width)


def tile_rows(num_rows: int, most: int, device: torch.device) -> int:
    """Rows per program: `most`, or fewer to have two programs for every multiprocessor."""
    rows = most
    while rows > 2 and num_rows < rows * 2 * _num_multiprocessors(device):
        rows //= 2
    return rows


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter runs one program after the other
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def check_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    check("x", x, FLOATS, (-1, -1), x.device)
    dtype = x.dtype if scale is None else torch.float8_e4m3fn
    check("weight", weight, dtype, (-1, x.shape[1]), x.device)
    rows, cols = weight.shape
    if scale is not None:
        check("scale", scale, torch.float32, num_blocks(rows, cols), x.device)
    if bias is not None:
        check("bias", bias, x.dtype, (rows,), x.device)


def linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    check_kernel_device(x)
    check_linear(x, weight, scale, bias)
    if x.shape[0] != 1:
        plain = weight if scale is None else dequantize(weight, scale, x.dtype)
        return F.linear(x, plain, bias)
    rows, cols = weight.shape
    if cols % 16:
        raise ValueError(f"weight has {cols} columns, expected a multiple of 16")
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    fp8 = scale is not None
    per_program = tile_rows(rows, 8, x.device)
    _gemv_kernel[(triton.cdiv(rows, per_program),)](
        x,
        weight.view(torch.int8) if fp8 else weight,
        scale,
        bias,
        out,
        rows,
        cols,
        chunk_size(weight.dtype),
        per_program,
        tile_columns(cols, weight.dtype),
        fp8,
        bias is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x` [T, in] times the transpose of `weight` [out, in] plus `bias` [out].

    The result has the dtype of `x`. So has `weight`, or it is float8_e4m3fn with `scale` f32
    [out/128, in/128] (rounded up), by which its 128x128 blocks are multiplied.
    """
    return (linear_triton if x.is_cuda else linear_reference)(x, weight, scale, bias)
