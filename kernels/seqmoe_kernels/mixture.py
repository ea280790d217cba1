"""The weighted sum of a token's experts."""

from __future__ import annotations

import torch


def combine_reference(
    pairs: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    total = pairs[:, 0] * weights[:, 0, None]
    for k in range(1, pairs.shape[1]):
        total = total + pairs[:, k] * weights[:, k, None]
    return total.to(out_dtype)


def combine(pairs: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Sum `pairs` (f32 [T, K, H]) times `weights` (f32 [T, K]) over k = 0..K-1, in that order.

    Returns `out_dtype` [T, H].
    """
    return combine_reference(pairs, weights, out_dtype)
