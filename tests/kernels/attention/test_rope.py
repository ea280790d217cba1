"""Rotary positions against their torch reference."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels.attention.rope import rotary, rotary_reference
from tests.kernels.rounding import DTYPES, UNIT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads,dim", [(3, 32), (2, 64), (1, 96), (4, 128)])
def test_rotary(
    device: torch.device, gen: torch.Generator, heads: int, dim: int, dtype: torch.dtype
) -> None:
    x = torch.randn((4, heads, dim), generator=gen).to(dtype)
    positions = torch.tensor([0, 7, 4095, 200_000])  # the last ones need a wide range reduction
    inv_freq = 1e6 ** (-torch.arange(0, dim, 2) / dim)
    expected = rotary_reference(x, positions, inv_freq)
    got = rotary.launch(x.to(device), positions.to(device), inv_freq.to(device))
    first, second = expected.double().chunk(2, -1)
    pair_length = torch.cat((first.hypot(second),) * 2, -1)  # rotation may cancel most of a value
    worst = ((got.cpu() - expected).double().abs() / pair_length).max()
    assert worst <= 3 * UNIT[dtype]


def test_rotary_turns_a_pair_by_its_angle(device: torch.device) -> None:
    x = torch.zeros(1, 1, 8)
    x[0, 0, 1] = 1.0  # pairs with dimension 5
    inv_freq = torch.tensor([1.0, 0.5, 0.25, 0.125])
    got = rotary.launch(x.to(device), torch.tensor([3], device=device), inv_freq.to(device)).cpu()
    expected = torch.zeros(8)
    expected[1], expected[5] = torch.tensor(1.5).cos(), torch.tensor(1.5).sin()
    torch.testing.assert_close(got[0, 0], expected)
