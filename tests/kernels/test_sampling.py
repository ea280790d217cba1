"""Sampling on a device that must not wait for its host, against the plain version."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels.sampling import (
    SamplingState,
    random_share,
    sample_reference,
    sample_unsynchronized,
)

SETTINGS = [  # temperature, top_k, top_p, min_p, repeat, presence, frequency
    (0.0, 40, 0.9, 0.1, 1.0, 0.0, 0.0),
    (0.0, 0, 1.0, 0.0, 1.3, 0.5, 0.2),
    (1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0),
    (0.7, 20, 0.95, 0.05, 1.1, 0.3, 0.1),
    (1.5, 0, 0.8, 0.0, 1.0, 0.0, 0.0),
    (0.1, 1, 0.0, 1.0, 1.0, 0.0, 0.0),
]


def start(settings: tuple[float, ...], vocab_size: int, device: torch.device) -> SamplingState:
    return SamplingState(
        torch.tensor(settings, device=device),
        torch.tensor([3, 0], device=device),
        torch.zeros(vocab_size, device=device),
        torch.zeros(vocab_size, dtype=torch.bool, device=device),
    )


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_same_tokens_as_the_reference(
    where: str, gen: torch.Generator, settings: tuple[float, ...]
) -> None:
    """Over an answer, whose tokens the penalties see. Logits repeat, so ties are broken alike."""
    device = torch.device(where)
    expected = start(settings, 1000, torch.device("cpu"))
    state = start(settings, 1000, device)
    tokens = set()
    for _ in range(30):
        logits = torch.randn(1000, generator=gen).mul(16).round().div(8)
        token = sample_reference(logits, expected)
        assert sample_unsynchronized(logits.to(device), state).tolist() == token.tolist()
        tokens.add(int(token))
    assert len(tokens) > 1
    for name, tensor in expected._asdict().items():
        assert torch.equal(getattr(state, name).cpu(), tensor), name


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_random_shares_are_those_of_splitmix64(seed: int) -> None:
    mask, state = 2**64 - 1, seed
    for number in range(5):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        assert float(random_share(torch.tensor([seed, number]))) == (z >> 11) / 2**53
