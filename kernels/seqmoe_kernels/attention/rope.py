"""Rotary position embedding of query and key heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.common.verb import verb


class Rotation(NamedTuple):
    """How a layer normalises (or not: None) and rotates its query and key heads.

    A norm of D weights is one of each head, a norm of n * D one over all n heads together.
    """

    inv_freq: torch.Tensor  # f32 [D/2]
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float


def rotary_reference(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor
) -> torch.Tensor:
    angle = positions.float()[:, None, None] * inv_freq  # [T, 1, D/2]
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


@triton.jit
def _rotary_kernel(x, positions, inv_freq, out, num_heads, D: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(0)
    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = out.dtype.element_ty
    i = tl.arange(0, BLOCK)
    mask = i < HALF
    at = head.to(tl.int64) * D + i
    first = tl.load(x + at, mask=mask, other=0).to(tl.float32)
    second = tl.load(x + at + HALF, mask=mask, other=0).to(tl.float32)
    position = tl.load(positions + head // num_heads).to(tl.float32)
    angle = position * tl.load(inv_freq + i, mask=mask, other=0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    tl.store(out + at, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out + at + HALF, (second * cos + first * sin).to(dtype), mask=mask)


@verb(rotary_reference)
def rotary(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotate the heads `x` [T, n, D] by `positions` (i64 [T]) times `inv_freq` (f32 [D/2]).

    Dimension i pairs with i + D/2. Angles and rotation are f32; the result has the dtype of `x`.
    """
    check("x", x, FLOATS, (-1, -1, -1), x.device)
    num_tokens, num_heads, dim = x.shape
    if dim % 2:
        raise ValueError(f"x has an odd head dimension, {dim}")
    check("positions", positions, torch.int64, (num_tokens,), x.device)
    check("inv_freq", inv_freq, torch.float32, (dim // 2,), x.device)
    out = torch.empty_like(x)
    if x.numel() > 0:
        _rotary_kernel[(num_tokens * num_heads,)](
            x=x,
            positions=positions,
            inv_freq=inv_freq,
            out=out,
            num_heads=num_heads,
            D=dim,
            BLOCK=triton.next_power_of_2(dim // 2),
            num_warps=1,
            enable_fp_fusion=True,
        )
    return out
