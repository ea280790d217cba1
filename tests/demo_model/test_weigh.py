"""The weighed healing is a model between those of the two trainings, whatever their ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tools.demo_model.sparse.decoder import LINEARS, NORMS
from tools.demo_model.sparse.delta import is_healed, read_delta, round_delta
from tools.demo_model.sparse.weigh import truncated, weigh

LAYERS, HIDDEN, NEURONS, NUM_EXPERTS, WIDTH = 3, 24, 48, 6, 20


def random_delta(attention_rank: int, support: Tensor) -> dict[str, Tensor]:
    """The delta of a student with random parameters."""
    parameters = {name: torch.randn(LAYERS, HIDDEN) for name in NORMS}
    for key in LINEARS:
        rank = attention_rank if is_healed(key) else 5
        into = NEURONS if key == "down" else HIDDEN
        out = NEURONS if key in ("gate", "up") else HIDDEN
        parameters[f"{key}.a"] = torch.randn(LAYERS, rank, into)
        parameters[f"{key}.b"] = torch.randn(LAYERS, out, rank)
    parameters["final_norm"] = torch.randn(HIDDEN)
    parameters["router"] = torch.randn(LAYERS, NUM_EXPERTS, HIDDEN)
    parameters["scale"] = torch.randn(LAYERS, NUM_EXPERTS, NEURONS)
    return round_delta(parameters, support)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_weighed_healing_lies_between_the_two_trainings(share: float) -> None:
    torch.manual_seed(6)
    held = torch.rand(LAYERS, NUM_EXPERTS, NEURONS).topk(WIDTH, dim=-1).indices
    support = torch.zeros(LAYERS, NUM_EXPERTS, NEURONS, dtype=torch.bool).scatter(-1, held, True)
    first, second = random_delta(3, support), random_delta(9, support)
    healed = {name: tensor for name, tensor in second.items() if is_healed(name)}
    found = weigh(first, healed, share)
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
        n: (t.shape, t.dtype) for n, t in healed.items()
    }
    old, new, made = (read_delta(d, NEURONS)[0] for d in (first, first | healed, first | found))
    for key in "qkvo":
        before, after, between = (p[f"{key}.b"] @ p[f"{key}.a"] for p in (old, new, made))
        wanted = torch.lerp(before, after, share)
        lost = torch.linalg.svdvals(wanted)[:, 9:].norm()
        assert (between - wanted).norm() < lost + 0.01 * wanted.norm(), key
    for name in (*NORMS, "final_norm", "router", "scale"):
        wanted = torch.lerp(old[name], new[name], share)
        torch.testing.assert_close(made[name], wanted, atol=1e-6, rtol=0.005, msg=name)


def test_truncated_factors_are_the_nearest_of_their_rank() -> None:
    torch.manual_seed(7)
    a, b = torch.randn(2, 7, 12), torch.randn(2, 10, 7)
    near_a, near_b = truncated(a, b, 4)
    assert near_a.shape == (2, 4, 12) and near_b.shape == (2, 10, 4)
    left, sizes, right = torch.linalg.svd(b @ a, full_matrices=False)
    nearest = left[:, :, :4] * sizes[:, None, :4] @ right[:, :4]
    torch.testing.assert_close(near_b @ near_a, nearest, atol=1e-4, rtol=1e-4)
