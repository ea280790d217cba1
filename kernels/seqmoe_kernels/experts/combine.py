"""The weighted sum of a token's experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.common.verb import verb


def combine_reference(
    pairs: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    total = pairs[:, 0] * weights[:, 0, None]
    for k in range(1, pairs.shape[1]):
        total = total + pairs[:, k] * weights[:, k, None]
    return total.to(out_dtype)


@triton.jit
def _combine_kernel(pairs, weights, out, K, H, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        pair = tl.load(pairs + (token * K + k) * H + column, mask=mask, other=0)
        total += pair * tl.load(weights + token * K + k)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=mask)


@verb(combine_reference)
def combine(pairs: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Sum `pairs` (f32 [T, K, H]) times `weights` (f32 [T, K]) over k = 0..K-1, in that order.

    Returns `out_dtype` [T, H].
    """
    check("pairs", pairs, torch.float32, (-1, -1, -1), pairs.device)
    num_tokens, top_k, hidden = pairs.shape
    check("weights", weights, torch.float32, (num_tokens, top_k), pairs.device)
    if out_dtype not in FLOATS:
        raise ValueError(f"out_dtype is {out_dtype}, expected {' or '.join(map(str, FLOATS))}")
    out = torch.empty((num_tokens, hidden), dtype=out_dtype, device=pairs.device)
    if out.numel() > 0:
        block = 256
        grid = (num_tokens, triton.cdiv(hidden, block))
        _combine_kernel[grid](
            pairs=pairs,
            weights=weights,
            out=out,
            K=top_k,
            H=hidden,
            BLOCK=block,
            num_warps=2,
            enable_fp_fusion=True,
        )
    return out
