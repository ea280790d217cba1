"""FP8 weights (e4m3) with an F32 scale for each block of 128x128.

Where the card converts FP8 by itself, kernels let it. Elsewhere they see the bytes as int8 and
decode them with integer operations, just as exactly: the code's exponent and mantissa bits are
moved to where f16 or f32 has them, which gives the value times 2^-8 or 2^-120 (the difference of
the two exponent biases). That is wrong for the two NaN codes only.

Weights and 16-bit vectors meet as f16: the codes fit exactly, and the vector does once each slice
of it is brought near to 1 by a power of two (what is then below 2^-39 of a slice's largest is
lost).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from seqmoe_kernels.formats import Format, Part, TileFunctions, check_parts, decode_by_tiles

BLOCK = 128
LARGEST = 448.0  # finite e4m3 value
_SMALLEST_SCALE = 2.0**-126  # a normal f32: keeps weight / scale finite for blocks near zero
_BLOCK = tl.constexpr(BLOCK)
_UNBIAS = tl.constexpr(2.0**120)


@functools.cache
def converts_fp8(device: torch.device) -> bool:
    """Whether the device has instructions for it."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def num_blocks(rows: int, cols: int) -> tuple[int, int]:
    """The shape of the scales of a [rows, cols] weight."""
    return -(-rows // BLOCK), -(-cols // BLOCK)


@triton.jit
def _scales(others, first, row, begin, inside, K: tl.constexpr, CACHE: tl.constexpr):
    """f32 [W, 8]: the rows of a tile lie in one row of blocks, a slice in one block."""
    at = others[0] + first // _BLOCK * tl.cdiv(K, _BLOCK) + begin // _BLOCK
    return tl.load(at, mask=inside, other=0.0, cache_modifier=CACHE)[:, None, :]


@triton.jit
def _joined(even, odd, is_odd):
    return tl.where(is_odd, odd, even)


@triton.jit
def _weights(rows, scales, OPERAND: tl.constexpr):
    if rows.dtype == tl.int8:
        spread_sign = rows.to(tl.int16) << 7  # s s e e e e m m m 0...
        half = (spread_sign & -0x4080).to(tl.float16, bitcast=True)  # s 0 e e e e m m m 0...
        return half.to(OPERAND)
    else:
        return rows.to(OPERAND)


@triton.jit
def _vector(rows, OPERAND: tl.constexpr, STORED: tl.constexpr):
    wide = rows.to(tl.float32)
    # A power of two that brings the largest below 2^15, most to 2^14, and its inverse.
    exponent = tl.max(tl.abs(wide), 2).to(tl.int32, bitcast=True) >> 23
    shrink = (tl.minimum(268 - exponent, 253) << 23).to(tl.float32, bitcast=True)
    factor = (tl.maximum(exponent - 14, 1) << 23).to(tl.float32, bitcast=True)
    if STORED.is_int8():  # by which `_weights` are too small
        factor *= 256.0
    return (wide * shrink[:, :, None]).to(OPERAND), factor


@triton.jit
def _factor(by, scales):
    return by[:, None, :] * scales


@triton.jit
def _dense(weight, others, row, column, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    factor = tl.load(others[0] + row // _BLOCK * tl.cdiv(cols, _BLOCK) + column // _BLOCK)
    row, column = row + tl.arange(0, ROWS), column + tl.arange(0, COLS)
    mask = (row < rows)[:, None] & (column < cols)[None, :]
    at = row[:, None].to(tl.int64) * cols + column[None, :]
    code = tl.load(weight + at, mask=mask, other=0.0)
    if code.dtype == tl.int8:
        spread_sign = code.to(tl.int32) << 20  # s s s s s e e e e m m m 0...
        biased = (spread_sign & -0x78100000).to(tl.float32, bitcast=True)  # s 0 0 0 0 e e e e m m m
        return biased * _UNBIAS * factor
    else:
        return code.to(tl.float32) * factor


class Fp8Block(Format):
    """Codes float8_e4m3fn [rows, cols] and F32 scales [rows/128, cols/128], rounded up."""

    name = "F8_E4M3"
    tiles = TileFunctions(tl.constexpr(8), _scales, _joined, _weights, _vector, _factor, _dense)

    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        return Part("", self.name, (rows, cols)), Part("_scale", "F32", num_blocks(rows, cols))

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        weight, scale = parts
        rows, cols = weight.shape
        check_parts(self, parts, rows, cols, weight.device)
        if weight.is_cuda:
            out = torch.empty((rows, cols), dtype=dtype, device=weight.device)
            decode_by_tiles(self.tiles, weight.view(torch.int8), (scale,), out)
            return out
        spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
        return (weight.float() * spread).to(dtype)

    def encode(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The scale of a block is its largest magnitude / 448, and 1 for a block of zeros; values
        round to nearest, ties to even."""
        rows, cols = weight.shape
        padded = pad(weight.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
        blocks = padded.reshape(len(padded) // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
        largest = blocks.abs().amax(dim=(1, 3))
        scales = torch.where(largest > 0, (largest / LARGEST).clamp_min(_SMALLEST_SCALE), 1.0)
        # Rounding of the quotient may end just above 448, which the cast would turn into NaN.
        scaled = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST)
        whole = scaled.reshape(padded.shape)[:rows, :cols]
        return whole.contiguous().to(torch.float8_e4m3fn), scales

    def operand(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype == torch.float32 else torch.float16

    def codes(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if converts_fp8(weight.device) else weight.view(torch.int8)


FP8 = Fp8Block()
FORMATS = (FP8,)
