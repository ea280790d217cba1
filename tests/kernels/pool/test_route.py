"""The router against its torch reference."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels.pool.route import route, route_reference
from tests.kernels.rounding import DTYPES


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
