"""Sampling: the kernels against the reference, the reference against a plain walk over a list."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from seqmoe_kernels import SamplingState
from seqmoe_kernels.sampling.integer_probs import NO_MASS, UNIT, distances, masses, random_share
from seqmoe_kernels.sampling.kernels import BLOCK
from seqmoe_kernels.sampling.sample import sample, sample_reference

CPU = torch.device("cpu")
DRAW = (1.0, 0.0, 1.0, 0.0)  # with every filter off
PLAIN = (1.0, 0.0, 0.0)  # without penalties
SETTINGS = [  # temperature, top_k, top_p, min_p, repeat, presence, frequency
    (0.0, 40.0, 0.9, 0.1, *PLAIN),
    (0.0, 0.0, 1.0, 0.0, 1.3, 0.5, 0.2),
    (*DRAW, *PLAIN),
    (1.0, 7.0, 1.0, 0.0, *PLAIN),
    (1.5, 0.0, 0.8, 0.0, *PLAIN),
    (1.0, 0.0, 1.0, 0.2, *PLAIN),
    (2.0, 50.0, 0.7, 0.0, *PLAIN),
    (0.7, 20.0, 0.95, 0.05, 1.1, 0.3, 0.1),
    (100.0, 10_000.0, 0.99, 0.5, *PLAIN),
    (0.1, 1.0, 0.001, 1.0, 0.9, 0.0, 0.0),
]
Run = Callable[[torch.Tensor, SamplingState], torch.Tensor]


def start(
    settings: tuple[float, ...], vocab_size: int, device: torch.device = CPU, seed: int = 3
) -> SamplingState:
    return SamplingState(
        torch.tensor(settings, device=device),
        torch.tensor([seed, 0], device=device),
        torch.zeros(vocab_size, device=device),
        torch.zeros(vocab_size, dtype=torch.bool, device=device),
    )


def random_logits(vocab_size: int, gen: torch.Generator) -> torch.Tensor:
    """They repeat, so that ties lie at most cuts, and a tenth of them is ruled out."""
    logits = torch.randn(vocab_size, generator=gen).mul(8).round().div(4)
    excluded = torch.rand(vocab_size, generator=gen) < 0.1
    return logits.masked_fill(excluded, -torch.inf)


def sample_plainly(logits: torch.Tensor, state: SamplingState) -> int:
    """Without penalties: from the list of all tokens, one after the other."""
    temperature, top_k, top_p, min_p = state.settings[:4].tolist()
    distance = distances(logits, state.settings[0]).tolist()
    mass = masses(torch.tensor(distance)).tolist()
    order = sorted(range(len(logits)), key=lambda token: (distance[token], token))
    if temperature == 0:
        return order[0]
    order = order[: int(top_k) or None]
    total, before, kept = sum(mass[token] for token in order), 0, []
    for token in order:
        if token == order[0] or before < top_p * total:
            kept.append(token)
        before += mass[token]
    kept = sorted(token for token in kept if mass[token] >= min_p * UNIT)
    spot = int(float(random_share(state.stream)) * sum(mass[token] for token in kept))
    for token in kept:
        spot -= mass[token]
        if spot < 0:
            return token
    raise AssertionError("the share is below 1")


@pytest.mark.parametrize("settings", [s for s in SETTINGS if s[0] > 0 and s[4:] == PLAIN])
def test_reference_against_a_plain_walk(gen: torch.Generator, settings: tuple[float, ...]) -> None:
    state = start(settings, 200)
    for _ in range(50):
        logits = random_logits(200, gen)
        expected = sample_plainly(logits, state)
        assert sample_reference(logits, state).tolist() == [expected]


@pytest.mark.parametrize("vocab_size", [317, 2 * BLOCK + 452])
@pytest.mark.parametrize("settings", SETTINGS)
def test_same_tokens_as_the_reference(
    device: torch.device, gen: torch.Generator, settings: tuple[float, ...], vocab_size: int
) -> None:
    """Over an answer, whose tokens the penalties see."""
    expected = start(settings, vocab_size)
    state = start(settings, vocab_size, device)
    for _ in range(4):
        logits = random_logits(vocab_size, gen)
        token = sample_reference(logits, expected)
        assert sample.launch(logits.to(device), state).tolist() == token.tolist()
    for name, tensor in expected._asdict().items():
        assert torch.equal(getattr(state, name).cpu(), tensor), name


@pytest.mark.parametrize("vocab_size", [1, 2, BLOCK, BLOCK + 1, 5000])
def test_sizes_and_dtypes(device: torch.device, gen: torch.Generator, vocab_size: int) -> None:
    logits = torch.randn(vocab_size, generator=gen) * 3
    dtypes = {0: torch.float32, 2: torch.bfloat16, 7: torch.float16}
    for number, dtype in dtypes.items():
        narrow, settings = logits.to(dtype), SETTINGS[number]
        token = sample_reference(narrow.float(), start(settings, vocab_size))
        state = start(settings, vocab_size, device)
        assert sample.launch(narrow.to(device), state).tolist() == token.tolist()
        assert torch.equal(sample_reference(narrow, start(settings, vocab_size)), token)


def runs(device: torch.device) -> list[tuple[Run, torch.device]]:
    return [(sample_reference, CPU), (sample.launch, device)]


@pytest.mark.parametrize(
    ("changes", "num_kept"),
    [({1: 5.0}, 5), ({1: BLOCK + 3.0}, BLOCK + 3), ({2: 0.5}, 750), ({1: 40.0, 2: 0.25}, 10)],
)
def test_of_equal_logits_the_lower_ids_are_kept(
    device: torch.device, changes: dict[int, float], num_kept: int
) -> None:
    settings = tuple(changes.get(i, value) for i, value in enumerate((*DRAW, *PLAIN)))
    for run, where in runs(device):
        state = start(settings, 1500, where)
        tokens = [int(run(torch.zeros(1500, device=where), state)) for _ in range(10)]
        assert num_kept / 2 < max(tokens) < num_kept
        assert len(set(tokens)) > 2


def test_greedy_takes_the_lowest_of_the_largest(device: torch.device) -> None:
    logits = torch.zeros(3 * BLOCK)
    logits[[BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 7]] = 1
    for run, where in runs(device):
        state = start((0.0, 0.0, 1.0, 0.0, *PLAIN), len(logits), where)
        assert run(logits.to(where), state).tolist() == [BLOCK - 1]


def test_draws_follow_the_softmax(device: torch.device) -> None:
    shares = torch.tensor([0.1, 0.0, 0.5, 0.3, 0.1])
    for run, where, count in ((sample_reference, CPU, 4000), (sample.launch, device, 40)):
        logits = shares.log().to(where)
        state = start((*DRAW, *PLAIN), len(shares), where)
        tokens = torch.tensor([int(run(logits, state)) for _ in range(count)])
        drawn = tokens.bincount(minlength=len(shares)) / count
        torch.testing.assert_close(drawn, shares, atol=1.5 * count**-0.5, rtol=0)
        assert drawn[1] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-42])
def test_broken_logits_give_a_token_of_the_vocabulary(
    device: torch.device, temperature: float
) -> None:
    infinite = torch.zeros(300)
    infinite[200] = torch.inf
    for run, where in runs(device):
        for logits in (torch.full((300,), torch.nan), torch.full((300,), -torch.inf), infinite):
            state = start((temperature, 5.0, 0.9, 0.1, *PLAIN), 300, where)
            token = int(run(logits.to(where), state))
            assert 0 <= token < 300
            assert token == 200 or logits is not infinite


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_graph_for_all_settings(gen: torch.Generator) -> None:
    device, vocab_size = torch.device("cuda"), 151936
    logits = torch.randn(vocab_size, generator=gen).mul(3).bfloat16().float()
    placed, state = logits.to(device), start(SETTINGS[0], vocab_size, device)
    sample.launch(placed, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token = sample.launch(placed, state)
    for settings in SETTINGS:
        expected = start(settings, vocab_size)
        for tensor, value in zip(state, expected, strict=True):
            tensor.copy_(value)
        for _ in range(5):
            graph.replay()
            assert token.tolist() == sample_reference(logits, expected).tolist()


def test_masses_are_probabilities() -> None:
    distance = torch.arange(0, NO_MASS, 97)
    exact = UNIT * 2 ** (-distance.double() / 2**19)
    assert ((masses(distance) - exact).abs() <= 1e-7 * exact + 1).all()
    assert masses(torch.tensor([0, NO_MASS - 1, NO_MASS])).tolist() == [UNIT, 1, 0]
    logits = torch.tensor([3.0, -torch.inf, 1.0, 3.0])
    mass = masses(distances(logits, torch.tensor(0.5)))
    assert mass.tolist() == [UNIT, 0, pytest.approx(UNIT * math.exp(-4), rel=3e-6), UNIT]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_random_shares_are_those_of_splitmix64(seed: int) -> None:
    mask, state = 2**64 - 1, seed
    for number in range(5):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        assert float(random_share(torch.tensor([seed, number]))) == (z >> 11) / 2**53
