"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.checks import FLOATS, check, check_kernel_device


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normal.to(x.dtype) * weight


@triton.jit
def _rms_norm_kernel(x, weight, out, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * H + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK)
    mask = column < H
    value = tl.load(x + at, mask=mask, other=0).to(tl.float32)
    normal = value * tl.rsqrt(tl.sum(value * value) / H + eps)
    gain = tl.load(weight + column, mask=mask, other=0).to(tl.float32)
    rounded = normal.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (rounded * gain).to(out.dtype.element_ty), mask=mask)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    check_kernel_device(x)
    check("x", x, FLOATS, tuple(x.shape), x.device)
    hidden = x.shape[-1]
    check("weight", weight, x.dtype, (hidden,), x.device)
    out = torch.empty_like(x)
    if x.numel() > 0:
        block = triton.next_power_of_2(hidden)
        warps = min(max(block // 256, 1), 16)
        grid = (x.numel() // hidden,)
        _rms_norm_kernel[grid](
            x, weight, out, eps, hidden, block, num_warps=warps, enable_fp_fusion=True
        )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension of `x` [..., H] in f32, cast back, multiply by `weight` [H]."""
    return (rms_norm_triton if x.is_cuda else rms_norm_reference)(x, weight, eps)
