"""Scores of the policies: against the sums that they stand for, and what they decide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from seqmoe_cli.residency.policies import (
    CLOCK_START,
    DOUBLING,
    ONE,
    WIDTHS,
    Blend,
    DecayedFrequency,
    ForecastAt,
    ForecastEviction,
    Ints,
    Lru,
    exp2_fixed,
    log2_sum,
)

STEPS, LAYERS, OF_LAYER, TOP_K = 60, 2, 8, 2
NONE = np.empty(0, np.int64)


def used_steps(seed: int) -> list[Ints]:
    """Per step the flat ids that each layer uses, [layers, K]."""
    rng = np.random.default_rng(seed)
    return [
        np.array([rng.permutation(OF_LAYER)[:TOP_K] + n * OF_LAYER for n in range(LAYERS)])
        for _ in range(STEPS)
    ]


def test_victims_have_the_smallest_scores_and_empty_slots_go_first() -> None:
    policy = Lru(4)
    for layer, experts in enumerate(([2, 3], [1], [0], [3])):
        policy.use(layer, np.array(experts))
    assert policy.score.tolist() == [3, 2, 1, 4, -1]
    owner = np.array([3, 2, -1, 1, -1, 0])
    assert policy.victims(owner, NONE, np.zeros(4)).tolist() == [2, 4, 1, 3]
    assert policy.victims(owner, np.array([2, 1]), np.zeros(2)).tolist() == [4, 3]
    assert policy.score.tolist() == [3, 2, 1, 4, -1]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=60), st.sampled_from([1.0, 7.3, 16.0]))
def test_score_is_the_logarithm_of_the_decayed_count(tokens: list[int], half_life: float) -> None:
    policy = DecayedFrequency(2, half_life)
    for token in sorted(tokens):
        policy.start_token(token)
        policy.use(0, np.array([1]))
    rate = policy.tick / DOUBLING  # what 1 / half_life is rounded to
    last = max(tokens)
    exact = np.log2(np.exp2(-rate * (last - np.array(tokens))).sum()) + rate * last
    score = (int(policy.score[1]) - CLOCK_START) / DOUBLING
    assert score == pytest.approx(exact, abs=0.003 * min(len(tokens), 20))
    assert policy.score[0] == 0


def test_integer_logarithms_and_powers() -> None:
    score = np.array([0, CLOCK_START - DOUBLING, CLOCK_START, CLOCK_START + 3 * DOUBLING])
    doublings = (log2_sum(score, CLOCK_START) - CLOCK_START) / DOUBLING
    assert doublings == pytest.approx([0, np.log2(1.5), 1, np.log2(9)], abs=0.002)
    assert log2_sum(score, CLOCK_START)[0] == CLOCK_START  # never used counts as nothing at all
    exponents = np.arange(-20 * DOUBLING, 5 * DOUBLING, 977)
    assert exp2_fixed(exponents) / ONE == pytest.approx(np.exp2(exponents / DOUBLING), rel=0.1)
    near = exponents[exponents > -8 * DOUBLING]
    assert exp2_fixed(near) / ONE == pytest.approx(np.exp2(near / DOUBLING), rel=0.002)
    assert exp2_fixed(np.array([-100 * DOUBLING])).tolist() == [0]


def truth(steps: list[Ints]) -> ForecastAt:
    """An exact forecast."""

    def at(token: int) -> NDArray[np.int64]:
        expected = np.zeros((4, LAYERS * OF_LAYER), np.int64)
        for window, (first, last) in enumerate(((1, 1), (2, 2), (3, 4), (5, 8))):
            for step in range(token + first - 1, min(token + last, STEPS)):
                expected[window, steps[step]] += ONE
        return expected

    return at


def run(steps: list[Ints], forecast: ForecastAt) -> tuple[Blend, ForecastEviction]:
    blend = Blend(LAYERS * OF_LAYER, forecast)
    policy = ForecastEviction(LAYERS, blend)
    for token, step in enumerate(steps[:-1]):
        for part in (blend, policy):
            part.start_token(token)
        for layer, experts in enumerate(step):
            for part in (blend, policy):
                part.use(layer, experts)
    return blend, policy


def test_trust_goes_to_what_comes_true() -> None:
    steps = used_steps(0)
    exact = truth(steps)
    assert run(steps, exact)[0].trust.tolist() == [256] * 4
    wrong, _ = run(steps, lambda token: np.outer(WIDTHS, np.full(16, ONE)) - exact(token))
    assert wrong.trust.max() < 30
    assert run(steps, lambda token: exact(token) // 2)[0].trust.min() > 200  # too shy, but right


def test_without_a_forecast_the_counts_decide() -> None:
    """Of one layer the expert with the smallest decayed count is the victim."""
    steps = used_steps(3)
    nothing = np.zeros((4, 16), np.int64)
    blend, policy = run(steps, lambda token: nothing)
    counts = DecayedFrequency(16)
    for token, step in enumerate(steps[:-1]):
        counts.start_token(token)
        counts.use(0, step.ravel())
    assert blend.counts.score.tolist() == counts.score.tolist()
    for layer in range(LAYERS):
        own = slice(layer * OF_LAYER, (layer + 1) * OF_LAYER)
        assert np.argsort(policy.score[own]).tolist() == np.argsort(counts.score[own]).tolist()


def test_a_trusted_forecast_decides() -> None:
    """Who is used sooner stays; a layer that is passed no longer counts its use in this step."""
    steps = used_steps(5)
    blend, policy = run(steps, truth(steps))
    last = STEPS - 1
    for part in (blend, policy):
        part.start_token(last)
    wanted = np.concatenate(steps[last])
    others = np.setdiff1d(np.arange(16), wanted)
    assert policy.score[wanted].min() > policy.score[others].max()
    before = policy.score.copy()
    for part in (blend, policy):
        part.use(0, steps[last][0])
    assert (policy.score[steps[last][0]] < before[steps[last][0]]).all()
    assert policy.score[OF_LAYER:].tolist() == before[OF_LAYER:].tolist()
