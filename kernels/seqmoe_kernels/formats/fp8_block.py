"""FP8 weights in 128x128 blocks: what a byte means, and decoding a whole matrix.

Where the card converts FP8 by itself, kernels let it. Elsewhere they see the bytes as int8 and
decode them with integer operations, just as exactly: the code's exponent and mantissa bits are
moved to where f16 or f32 has them, which gives the value times 2^-8 or 2^-120 (the difference of
the two exponent biases).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check, check_kernel_device
from seqmoe_kernels.common.verb import verb

BLOCK = 128
_BLOCK = tl.constexpr(BLOCK)
_UNBIAS = tl.constexpr(2.0**120)


@functools.cache
def converts_fp8(device: torch.device) -> bool:
    """Whether the device has instructions for it."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def kernel_codes(weight: torch.Tensor) -> torch.Tensor:
    """FP8 weights as kernels on their device want to see them."""
    return weight if converts_fp8(weight.device) else weight.view(torch.int8)


def num_blocks(rows: int, cols: int) -> tuple[int, int]:
    """The shape of the scales of a [rows, cols] weight."""
    return -(-rows // BLOCK), -(-cols // BLOCK)


@triton.jit
def block_row(row, K: tl.constexpr):
    """The offset of the scales of row `row` of a weight with K columns."""
    return row // _BLOCK * tl.cdiv(K, _BLOCK)


def dequantize_reference(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    rows, cols = weight.shape
    spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return (weight.float() * spread).to(dtype)


@triton.jit
def decode_biased(byte):
    """Decode int8 e4m3 codes to f32 values times 2^-120. Wrong for the two NaN codes only."""
    spread_sign = byte.to(tl.int32) << 20  # s s s s s e e e e m m m 0...
    return (spread_sign & -0x78100000).to(tl.float32, bitcast=True)  # s 0 0 0 0 e e e e m m m 0...


@triton.jit
def decode_half(byte):
    """Decode int8 e4m3 codes to f16 values times 2^-8. Wrong for the two NaN codes only."""
    spread_sign = byte.to(tl.int16) << 7  # s s e e e e m m m 0...
    return (spread_sign & -0x4080).to(tl.float16, bitcast=True)  # s 0 e e e e m m m 0...


@triton.jit
def _dequantize_kernel(weight, scale, out, rows, cols, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    at = row[:, None].to(tl.int64) * cols + col[None, :]
    scale_row = tl.program_id(0) * ROWS // _BLOCK
    factor = tl.load(scale + scale_row * tl.cdiv(cols, _BLOCK) + tl.program_id(1))
    value = decode_biased(tl.load(weight + at, mask=mask, other=0)) * _UNBIAS
    tl.store(out + at, (value * factor).to(out.dtype.element_ty), mask=mask)


@verb(dequantize_reference)
def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `weight` (float8_e4m3fn [R, C]) times its block's `scale` (f32 [R/128, C/128], rounded
    up), rounded once to `dtype`.
    """
    check_kernel_device(weight)
    check("weight", weight, torch.float8_e4m3fn, (-1, -1), weight.device)
    rows, cols = weight.shape
    check("scale", scale, torch.float32, num_blocks(rows, cols), weight.device)
    if dtype not in FLOATS:
        raise ValueError(f"dtype is {dtype}, expected {' or '.join(map(str, FLOATS))}")
    out = torch.empty((rows, cols), dtype=dtype, device=weight.device)
    tile_rows = 32
    grid = (triton.cdiv(rows, tile_rows), triton.cdiv(cols, BLOCK))
    _dequantize_kernel[grid](
        weight.view(torch.int8), scale, out, rows, cols, tile_rows, enable_fp_fusion=True
    )
    return out
