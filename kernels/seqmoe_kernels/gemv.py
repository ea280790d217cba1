"""Linear layers whose weights may be FP8: a matrix-vector kernel for one token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from seqmoe_kernels.fp8 import dequantize_reference


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
    return linear_reference(x, weight, scale, bias)
