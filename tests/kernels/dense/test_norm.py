"""Root mean square norm against its torch reference."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels.dense.norm import rms_norm, rms_norm_reference
from tests.kernels.rounding import DTYPES, assert_rounded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 128), (5, 576), (3, 2, 96)])
def test_rms_norm(
    device: torch.device, gen: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape, generator=gen).mul(3).to(dtype)
    weight = torch.randn(shape[-1], generator=gen).to(dtype)
    got = rms_norm.launch(x.to(device), weight.to(device), 1e-6)
    assert_rounded(got, rms_norm_reference(x, weight, 1e-6), 2)


def test_rms_norm_counts_eps_and_every_column(device: torch.device) -> None:
    x = torch.full((1, 96), 1e-3)
    x[0, 95] = 0.5
    got = rms_norm.launch(x.to(device), torch.ones(96, device=device), 1e-2).cpu()
    expected = x / (x.double().square().mean() + 1e-2).sqrt().float()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
