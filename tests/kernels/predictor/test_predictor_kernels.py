"""The four kernels of a predictor's step against their torch references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from seqmoe_kernels import (
    ExpertHeads,
    GruWeights,
    Norm,
    StepInput,
    TokenInput,
    UseHistory,
    expected_uses,
)
from seqmoe_kernels.predictor import heads as heads_module
from seqmoe_kernels.predictor.embed import sum_rows, sum_rows_reference
from seqmoe_kernels.predictor.f32_gemv import Tiling
from seqmoe_kernels.predictor.gru import gru_step, gru_step_reference
from seqmoe_kernels.predictor.horizons import window_vectors, window_vectors_reference

Draw = Callable[..., torch.Tensor]
DTYPES = [torch.float32, torch.bfloat16]
# width, layers, experts of a layer, used of them, rank of the token table
SHAPES = [
    (16, 1, 4, 1, 0),
    (48, 3, 8, 2, 6),
    (192, 2, 20, 3, 16),
    (272, 5, 12, 4, 33),
    (768, 2, 16, 8, 64),
]


@pytest.fixture
def draw(gen: torch.Generator) -> Draw:
    def normal(*sizes: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(sizes, generator=gen) * scale).to(dtype)

    return normal


def moved(value: Any, device: torch.device) -> Any:
    """Copies on `device` of the tensors in what a verb takes."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Weights are read as they are and sums are f32 on both sides: only their order differs."""
    torch.testing.assert_close(got.cpu(), expected, rtol=tolerance, atol=tolerance)


def some_used(gen: torch.Generator, layers: int, experts: int, top_k: int) -> torch.Tensor:
    rows = [torch.randperm(experts, generator=gen)[:top_k] + n * experts for n in range(layers)]
    return torch.cat(rows).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width,layers,experts,top_k,rank", SHAPES)
def test_sum_rows(
    device: torch.device,
    gen: torch.Generator,
    draw: Draw,
    width: int,
    layers: int,
    experts: int,
    top_k: int,
    rank: int,
    dtype: torch.dtype,
) -> None:
    table = draw(layers * experts, width, dtype=dtype)
    used, token = some_used(gen, layers, experts, top_k), torch.tensor([7])
    token_input = TokenInput(draw(9, rank, dtype=dtype), draw(width, rank, dtype=dtype))
    nothing = torch.full_like(used, layers * experts)
    for ids in (used, nothing):
        arguments = (table, StepInput(ids, token, token_input if rank else None))
        expected = sum_rows_reference(*arguments)
        assert_near(sum_rows.launch(*moved(arguments, device)), expected)
        assert torch.equal(sum_rows(*arguments), expected)
    if not rank:
        assert not expected.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 48, 192, 272])
def test_gru_step(device: torch.device, draw: Draw, width: int, dtype: torch.dtype) -> None:
    scale = 2 * width**-0.5
    weights = GruWeights(
        *(draw(3 * width, width, scale=scale, dtype=dtype) for _ in range(2)),
        *(draw(3 * width, dtype=dtype) for _ in range(2)),
    )
    norm = Norm(draw(width, dtype=dtype), 1e-5)
    arguments = (draw(width, scale=3.0), norm, weights, draw(width), torch.empty(width))
    arguments_there = moved(arguments, device)
    expected = gru_step_reference(*arguments)
    assert_near(gru_step.launch(*arguments_there), expected)
    assert_near(arguments_there[-1], arguments[-1])
    assert torch.equal(arguments_there[3].cpu(), arguments[3])
    assert torch.equal(gru_step(*arguments), expected)


def test_gru_step_is_that_of_torch(draw: Draw) -> None:
    gru = torch.nn.GRU(32, 32)
    weights = GruWeights(*gru.all_weights[0])
    x, past, present = draw(32), draw(32), torch.empty(32)
    with torch.no_grad():
        out = gru_step_reference(x, Norm(torch.ones(32), 0.0), weights, past, present)
        normal = x / x.square().mean().sqrt()
        expected = gru(normal[None, None], past[None, None])[0][0, 0]
    torch.testing.assert_close(present, expected)
    torch.testing.assert_close(out, x + expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 48, 272])
def test_window_vectors(device: torch.device, draw: Draw, width: int, dtype: torch.dtype) -> None:
    matrix = draw(4 * width, width, scale=2 * width**-0.5, dtype=dtype)
    norm = Norm(draw(width, dtype=dtype), 1e-5)
    arguments = (draw(width, scale=3.0), norm, matrix, draw(4 * width, dtype=dtype))
    expected = window_vectors_reference(*arguments)
    assert expected.shape == (4, width)
    assert_near(window_vectors.launch(*moved(arguments, device)), expected)
    assert torch.equal(window_vectors(*arguments), expected)


def some_heads(
    draw: Draw, width: int, layers: int, experts: int, dtype: torch.dtype
) -> ExpertHeads:
    return ExpertHeads(
        draw(layers * experts, width, scale=width**-0.5, dtype=dtype),
        draw(4, layers * experts),
        draw(3, 4, layers, scale=0.3),
        torch.tensor([0.5, 0.9, 0.99]),
        torch.tensor([1.0, 1.0, 2.0, 4.0]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width,layers,experts,top_k,rank", SHAPES)
def test_expected_uses(
    device: torch.device,
    gen: torch.Generator,
    draw: Draw,
    width: int,
    layers: int,
    experts: int,
    top_k: int,
    rank: int,
    dtype: torch.dtype,
) -> None:
    num_flat, heads = layers * experts, some_heads(draw, width, layers, experts, dtype)
    token_input = TokenInput(
        draw(9, rank, dtype=dtype), draw(4 * num_flat, rank, scale=0.3, dtype=dtype)
    )
    history = UseHistory(draw(3, num_flat).abs(), draw(2, 2, width))
    present = history.states[1].clone()
    vectors, token = draw(4, width), torch.tensor([3])
    there, out = moved(history, device), torch.empty(4, num_flat)
    nothing = torch.full((layers * top_k,), num_flat, dtype=torch.int32)
    for used in (some_used(gen, layers, experts, top_k), nothing):
        arguments = (vectors, heads, StepInput(used, token, token_input if rank else None))
        result = torch.empty(4, num_flat, device=device)
        expected_uses.launch(*moved(arguments, device), there, result)
        expected_uses(*arguments, history, out)
        assert_near(result, out)
        assert_near(there.counts, history.counts)
        assert torch.equal(there.states.cpu(), torch.stack((present, present)))
        assert torch.equal(history.states[0], present)
    limits = heads.widths[:, None].expand_as(out)
    assert (out > 0).all() and (out < limits).all()


def test_expected_uses_by_hand(device: torch.device) -> None:
    """Two layers of two experts, one used of each: counts, windows and layers are told apart."""
    width, zero = 16, torch.zeros
    by_counts = zero(1, 4, 2)
    by_counts[0, 1, 1] = 1.0
    heads = ExpertHeads(
        zero(4, width), zero(4, 4), by_counts, torch.tensor([0.5]), torch.tensor([1.0, 1, 2, 4])
    )
    heads.base[2, 3] = 100.0
    heads.experts[0, 5] = 1.0
    vectors = zero(4, width)
    vectors[3, 5] = -100.0
    history = UseHistory(torch.tensor([[0.0, 2, 4, 6]]), zero(2, 2, width))
    used, token, out = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0]), zero(4, 4)
    run = expected_uses.launch if device.type == "cuda" else expected_uses
    arguments = moved((vectors, heads, StepInput(used, token, None), history, out), device)
    run(*arguments)
    assert arguments[3].counts.tolist() == [[0, 2, 3 + 0, 3]]
    expected = torch.tensor([0.5, 0.5, 1, 2])[:, None].repeat(1, 4)
    expected[1, 2:] = torch.log2(torch.tensor([1.51, 1.51])).sigmoid()
    expected[2, 3], expected[3, 0] = 2.0, 0.0
    torch.testing.assert_close(arguments[4].cpu(), expected)


def test_the_tiling_changes_rounding_at_most(
    device: torch.device, gen: torch.Generator, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, layers, experts, top_k = 272, 3, 11, 2
    heads = moved(some_heads(draw, width, layers, experts, torch.bfloat16), device)
    used = some_used(gen, layers, experts, top_k).to(device)
    vectors, token = draw(4, width).to(device), torch.zeros(1, dtype=torch.int64, device=device)
    found = []
    for tiling in (Tiling(8, 256, 2, 4), Tiling(4, 512, 1, 2), Tiling(16, 128, 3, 4)):
        history = UseHistory(
            torch.zeros(3, layers * experts, device=device),
            torch.zeros(2, 2, width, device=device),
        )
        out = torch.empty(4, layers * experts, device=device)
        monkeypatch.setattr(heads_module, "narrow_tiling", lambda *_, tiling=tiling: tiling)
        expected_uses.launch(vectors, heads, StepInput(used, token, None), history, out)
        found.append(out.cpu())
    for out in found[1:]:
        torch.testing.assert_close(out, found[0], rtol=1e-5, atol=1e-6)


def some_step(used: torch.Tensor) -> StepInput:
    return StepInput(used, torch.zeros(1, dtype=torch.int64), None)


@pytest.mark.parametrize(
    "change,words",
    [
        (
            {"step": some_step(torch.zeros(5, dtype=torch.int32))},
            "2 layers have 6 experts and use 5",
        ),
        ({"step": some_step(torch.zeros(4))}, "used is torch.float32"),
        ({"vectors": torch.zeros(3, 16)}, "vectors has shape"),
        ({"history": UseHistory(torch.zeros(3, 5), torch.zeros(2, 2, 16))}, "counts has shape"),
    ],
)
def test_arguments_that_do_not_fit(
    device: torch.device, draw: Draw, change: dict[str, Any], words: str
) -> None:
    arguments = {
        "vectors": draw(4, 16),
        "heads": some_heads(draw, 16, 2, 3, torch.float32),
        "step": some_step(torch.zeros(4, dtype=torch.int32)),
        "history": UseHistory(torch.zeros(3, 6), torch.zeros(2, 2, 16)),
        "out": torch.zeros(4, 6),
    }
    with pytest.raises(ValueError, match=words):
        expected_uses.launch(**{k: moved(v, device) for k, v in (arguments | change).items()})
