"""A verb called with CPU tensors takes its reference."""

from __future__ import annotations

import torch

from seqmoe_kernels.attention.rope import rotary, rotary_reference
from seqmoe_kernels.dense.norm import rms_norm, rms_norm_reference
from seqmoe_kernels.experts.combine import combine, combine_reference
from seqmoe_kernels.pool.route import route, route_reference


def test_verbs_dispatch_by_device(gen: torch.Generator) -> None:
    """CPU tensors always take the reference: bit-equal, also where Triton rounds differently."""
    x = torch.randn((2, 4, 32), generator=gen).bfloat16()
    weight = torch.randn(32, generator=gen).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    positions, inv_freq = torch.tensor([3, 9]), torch.rand(16, generator=gen)
    assert torch.equal(rotary(x, positions, inv_freq), rotary_reference(x, positions, inv_freq))
    wide = x[0].float()
    assert torch.equal(route(wide, 3, True)[1], route_reference(wide, 3, True)[1])
    weights = torch.rand((2, 4), generator=gen)
    assert torch.equal(
        combine(x.float(), weights, torch.bfloat16),
        combine_reference(x.float(), weights, torch.bfloat16),
    )
