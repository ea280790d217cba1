"""Sampling: each filter keeps what it should, and draws follow the distribution."""

from __future__ import annotations

import pytest
import torch

from seqmoe_cli.engine.decoding import Sampler
from seqmoe_cli.settings import SamplingParams

CPU = torch.device("cpu")
OFF = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=5)
LOGITS = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04]).log()


def params(**changes: float) -> SamplingParams:
    return SamplingParams(**{**OFF.__dict__, **changes})


def sampler_for(p: SamplingParams, vocab_size: int) -> Sampler:
    """At the start of an answer to a prompt that is token 0."""
    sampler = Sampler(vocab_size, CPU)
    sampler.begin(p, [0])
    return sampler


def drawn(p: SamplingParams, logits: torch.Tensor = LOGITS, count: int = 400) -> torch.Tensor:
    """Shares of the tokens over `count` independent answers."""
    tokens = [
        int(sampler_for(params(**{**p.__dict__, "seed": seed}), len(logits))(logits))
        for seed in range(count)
    ]
    return torch.tensor(tokens).bincount(minlength=len(logits)) / count


def test_draws_follow_the_softmax() -> None:
    torch.testing.assert_close(drawn(OFF, count=3000), LOGITS.exp(), atol=0.03, rtol=0)


def test_temperature_sharpens() -> None:
    expected = (LOGITS / 0.5).softmax(0)
    torch.testing.assert_close(
        drawn(params(temperature=0.5), count=3000), expected, atol=0.03, rtol=0
    )


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_k": 1}, 1),
        ({"top_p": 0.75}, 2),  # 0.5 + 0.3 crosses 0.75
        ({"top_p": 0.01}, 1),
        ({"min_p": 0.15}, 3),  # 0.15 * 0.5 = 0.075
        ({"top_k": 3, "top_p": 0.6}, 2),  # of the renormalised 0.556, 0.333, 0.111
    ],
)
def test_filters_keep_the_likeliest(changes: dict[str, float], kept: int) -> None:
    shares = drawn(params(**changes))
    assert (shares > 0).sum() == kept
    assert (shares[:kept] > 0).all()


def test_greedy_ignores_the_filters() -> None:
    sampler = sampler_for(params(temperature=0, top_k=3, top_p=0.1), 5)
    assert [int(sampler(LOGITS)) for _ in range(3)] == [0, 0, 0]


def test_same_seed_same_text() -> None:
    def text(seed: int | None) -> list[int]:
        sampler = sampler_for(params(seed=seed), 50)  # type: ignore[arg-type]
        return [int(sampler(torch.zeros(50))) for _ in range(30)]

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(None) != text(None)


def test_repeat_penalty_sees_prompt_and_answer() -> None:
    logits = torch.tensor([2.0, 1.9, 1.8, -1.0])
    sampler = sampler_for(params(temperature=0, repeat_penalty=1.5), 4)
    assert [int(sampler(logits)) for _ in range(2)] == [1, 2]  # 0 stands in the prompt
    sampler = sampler_for(params(temperature=0, repeat_penalty=3.0), 2)
    assert int(sampler(torch.tensor([-1.0, -2.0]))) == 1  # negative logits grow more negative


def test_presence_and_frequency_count_the_answer_alone() -> None:
    logits = torch.tensor([2.0, 1.5, 0.0])
    sampler = sampler_for(params(temperature=0, presence_penalty=1.0), 3)
    assert [int(sampler(logits)) for _ in range(4)] == [0, 1, 0, 0]
    sampler = sampler_for(params(temperature=0, frequency_penalty=0.4), 3)
    assert [int(sampler(logits)) for _ in range(4)] == [0, 0, 1, 0]
