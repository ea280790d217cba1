"""Norm, rotary, router and combine against their torch references."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels.attention.rope import rotary, rotary_reference
from seqmoe_kernels.dense.norm import rms_norm, rms_norm_reference
from seqmoe_kernels.experts.combine import combine, combine_reference
from seqmoe_kernels.pool.route import route, route_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The largest relative error of one rounding; the interpreter cuts bfloat16 off instead.
UNIT = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}


def assert_rounded(
    got: torch.Tensor, expected: torch.Tensor, num_roundings: int, slack: float = 0.0
) -> None:
    limit = num_roundings * UNIT[expected.dtype]
    torch.testing.assert_close(got.cpu(), expected, rtol=limit, atol=slack)


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


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,experts,top_k", [(1, 128, 8), (3, 8, 2), (2, 60, 4), (1, 3, 3)])
def test_route(
    device: torch.device,
    gen: torch.Generator,
    rows: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    renormalize: bool,
) -> None:
    logits = torch.randn((rows, experts), generator=gen).mul(2).to(dtype)
    ids, weights = route.launch(logits.to(device), top_k, renormalize)
    expected_ids, expected_weights = route_reference(logits, top_k, renormalize)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected_weights, rtol=2e-6, atol=1e-7)


def test_route_prefers_the_lower_id_among_equals(device: torch.device) -> None:
    zeros = torch.zeros(1, 8)
    zeros[0, ::2] = -0.0  # as large as 0.0
    assert route.launch(zeros.to(device), 3, True)[0].tolist() == [[0, 1, 2]]
    assert route_reference(zeros, 3, True)[0].tolist() == [[0, 1, 2]]
    negative = torch.tensor([[-5.0, -2.0, -9.0, -2.0, float("-inf"), -2.0]])
    assert route.launch(negative.to(device), 4, False)[0].tolist() == [[1, 3, 5, 0]]
    assert route_reference(negative, 4, False)[0].tolist() == [[1, 3, 5, 0]]


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in the interpreter
def test_route_of_nan_logits_stays_in_range(device: torch.device) -> None:
    ids, _ = route.launch(torch.full((1, 6), float("nan"), device=device), 3, True)
    assert sorted(ids.cpu()[0].tolist()) == [0, 1, 2]


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
