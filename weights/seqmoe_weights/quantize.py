"""FP8 e4m3 in blocks of 128x128: quantise one weight."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

BLOCK = 128
FP8_MAX = 448.0  # largest finite e4m3 value
_MIN_SCALE = 2.0**-126  # smallest normal float32: keeps weight / scale finite for blocks near zero


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `weight` [R, C] to float8_e4m3fn, with F32 scales [ceil(R/128), ceil(C/128)].

    `value * scale` restores the weight. The scale of a block is its largest magnitude / 448, and 1
    for a block of zeros; values round to nearest, ties to even. `weight` must be finite.
    """
    blocks = _blocks(weight.float())
    largest = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(largest > 0, (largest / FP8_MAX).clamp_min(_MIN_SCALE), 1.0)
    # Rounding of the quotient may end just above 448, which the cast would turn into NaN.
    scaled = (blocks / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    return _unblock(scaled, weight.shape).to(torch.float8_e4m3fn), scales


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """[R, C] -> [R/128, 128, C/128, 128], padded with zeros."""
    rows, columns = weight.shape
    padded = pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def _unblock(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    whole = blocks.reshape(blocks.shape[0] * BLOCK, blocks.shape[2] * BLOCK)
    return whole[: shape[0], : shape[1]].contiguous()
