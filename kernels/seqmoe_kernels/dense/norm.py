"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.common.verb import verb


class Norm(NamedTuple):
    """The arguments of a norm beside its input: `weight` [H] in the input's dtype, `eps`."""

    weight: torch.Tensor
    eps: float


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normal.to(x.dtype) * weight


@triton.jit
def inverse_rms(x, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    """1 over the root of the mean square of `x` [H], plus `eps`: f32."""
    column = tl.arange(0, BLOCK)
    value = tl.load(x + column, mask=column < H, other=0).to(tl.float32)
    return tl.rsqrt(tl.sum(value * value) / H + eps)


@triton.jit
def normalized(value, gain, inv_rms, dtype: tl.constexpr):
    """f32 values times `inv_rms`, cast to `dtype`, times `gain`, cast again."""
    return ((value * inv_rms).to(dtype).to(tl.float32) * gain).to(dtype)


@triton.jit
def _rms_norm_kernel(x, weight, out, eps, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64) * H
    inv_rms = inverse_rms(x + at, eps, H, BLOCK)
    column = tl.arange(0, BLOCK)
    mask = column < H
    value = tl.load(x + at + column, mask=mask, other=0).to(tl.float32)
    gain = tl.load(weight + column, mask=mask, other=0).to(tl.float32)
    tl.store(out + at + column, normalized(value, gain, inv_rms, out.dtype.element_ty), mask=mask)


@verb(rms_norm_reference)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension of `x` [..., H] in f32, cast back, multiply by `weight` [H]."""
    check("x", x, FLOATS, tuple(x.shape), x.device)
    hidden = x.shape[-1]
    check("weight", weight, x.dtype, (hidden,), x.device)
    out = torch.empty_like(x)
    if x.numel() > 0:
        block = triton.next_power_of_2(hidden)
        warps = min(max(block // 256, 1), 16)
        grid = (x.numel() // hidden,)
        _rms_norm_kernel[grid](
            x=x,
            weight=weight,
            out=out,
            eps=eps,
            H=hidden,
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=True,
            **pdl_options(x.device),
        )
    return out
