"""The weighted sum of experts against its torch reference."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels.experts.combine import combine, combine_reference
from tests.kernels.rounding import DTYPES, assert_rounded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens,top_k,hidden", [(1, 8, 256), (3, 2, 576), (2, 1, 96)])
def test_combine(
    device: torch.device,
    gen: torch.Generator,
    tokens: int,
    top_k: int,
    hidden: int,
    dtype: torch.dtype,
) -> None:
    pairs = torch.randn((tokens, top_k, hidden), generator=gen)
    weights = torch.rand((tokens, top_k), generator=gen)
    got = combine.launch(pairs.to(device), weights.to(device), dtype)
    assert_rounded(got, combine_reference(pairs, weights, dtype), 1, slack=1e-6)


def test_combine_adds_in_the_order_of_k(device: torch.device) -> None:
    """1 + 2^30 - 2^30 is 0 in that order; every other order gives 1."""
    pairs = torch.tensor([1.0, 2.0**30, -(2.0**30)]).view(1, 3, 1).expand(1, 3, 64).contiguous()
    ones = torch.ones(1, 3)
    assert not combine_reference(pairs, ones, torch.float32).any()
    assert not combine.launch(pairs.to(device), ones.to(device), torch.float32).any()


def test_combine_gives_a_token_the_same_bits_in_any_company(
    device: torch.device, gen: torch.Generator
) -> None:
    pairs = torch.randn((4, 3, 96), generator=gen).to(device)
    weights = torch.rand((4, 3), generator=gen).to(device)
    for run in (combine.launch, combine_reference):
        alone = [run(pairs[t : t + 1], weights[t : t + 1], torch.float32) for t in range(4)]
        assert torch.equal(torch.cat(alone), run(pairs, weights, torch.float32))
