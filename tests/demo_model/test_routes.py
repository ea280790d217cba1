"""Traces of the sparse demo model: which tokens are an answer, and experts that are those of the
model's own routers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tools.demo_model.sparse.decoder import Decoder, Experts, Layer, Shape, hidden_states, route
from tools.demo_model.sparse.routes import phases, routes

START, END = 1, 2
HEADER = [START, 7, 8]
TOP_K = 2


def tiny_model() -> Decoder:
    torch.manual_seed(0)
    h, n = 16, 24
    shape = Shape(3, h, n, 2, 1, 8, 1e-5, 1e4)
    sizes = {"q": (h, h), "k": (8, h), "v": (8, h), "o": (h, h)}
    sizes |= {"gate": (n, h), "up": (n, h), "down": (h, n)}
    layers = [
        Layer(
            **{name: 0.3 * torch.randn(size) for name, size in sizes.items()},
            attention_norm=torch.ones(h),
            ffn_norm=torch.ones(h),
        )
        for _ in range(3)
    ]
    experts = [Experts(torch.randn(6, h), (torch.rand(6, n) > 0.5).float()) for _ in range(3)]
    return Decoder(shape, torch.randn(97, h), layers, torch.ones(h), experts, TOP_K)


def test_answers_are_told_from_prompts() -> None:
    rows = np.array(
        [
            [START, 5, 8, 9, END, 8, START, 7, 8, 30, 31, END, 8, START, 5, 8, 4, END],
            [START, 7, 8, 30, 7, 8, 31, 32, 33, 34, 35, END, 6, START, 7, 8, 30, 31],
            [7, 8, 30, 31, 7, 8, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, START],
        ]
    )
    found = phases(rows, HEADER, END)
    assert [np.flatnonzero(row).tolist() for row in found] == [
        [9, 10],
        [3, 4, 5, 6, 7, 8, 9, 10, 16, 17],
        [],
    ]


@pytest.mark.parametrize("rank", [0, 4])
def test_experts_are_those_of_the_routers(rank: int) -> None:
    model = tiny_model()
    rows = torch.randint(0, 97, (3, 10), generator=torch.Generator().manual_seed(0))
    experts, hidden = routes(model, rows, rank)
    assert experts.shape == (3, 10, model.shape.num_layers, TOP_K)
    assert (hidden is None) == (rank == 0)
    assert hidden is None or hidden.shape == (3, 10, rank)
    assert model.experts is not None

    def compare(layer: int, x: torch.Tensor) -> None:
        weights, _ = route(x, model.experts[layer].router, TOP_K)  # type: ignore[index]
        named = torch.zeros_like(weights, dtype=torch.bool)
        named.scatter_(-1, torch.from_numpy(experts[:, :, layer]).long(), True)
        assert torch.equal(named, weights > 0)

    with torch.no_grad():
        hidden_states(model, rows, compare)
