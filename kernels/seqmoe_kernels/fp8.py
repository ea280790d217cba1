"""FP8 weights in 128x128 blocks: what a byte means, and decoding a whole matrix."""

from __future__ import annotations

import torch

BLOCK = 128


def dequantize_reference(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    rows, cols = weight.shape
    spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return (weight.float() * spread).to(dtype)


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `weight` (float8_e4m3fn [R, C]) times its block's `scale` (f32 [R/128, C/128], rounded
    up), rounded once to `dtype`.
    """
    return dequantize_reference(weight, scale, dtype)
