"""Rotary position embedding of query and key heads, after an optional per-head norm."""

from __future__ import annotations

import torch

from seqmoe_kernels.norm import rms_norm_reference


def rotary_reference(
    x: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    if norm_weight is not None:
        x = rms_norm_reference(x, norm_weight, eps)
    angle = positions.float()[:, None, None] * inv_freq  # [T, 1, D/2]
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def rotary(
    x: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotate the heads `x` [T, n, D] by `positions` (i64 [T]) times `inv_freq` (f32 [D/2]).

    Dimension i pairs with i + D/2. With `norm_weight` [D] each head is RMS-normalised first.
    Angles and rotation are f32; the result has the dtype of `x`.
    """
    return rotary_reference(x, positions, inv_freq, norm_weight, eps)
