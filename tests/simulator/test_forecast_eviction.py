"""Eviction by forecast: when it trusts the forecast, and which expert it evicts then."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from seqmoe_cli.residency.policies import DOUBLING, ONE, WIDTHS, Ints
from tools.simulator.forecast_eviction import Blend, ForecastAt, ForecastEviction, exp2_fixed
from tools.simulator.scores import DecayedFrequency

STEPS, LAYERS, OF_LAYER, TOP_K = 60, 2, 8, 2


def used_steps(seed: int) -> list[Ints]:
    """Per step the flat ids that each layer uses, [layers, K]."""
    rng = np.random.default_rng(seed)
    return [
        np.array([rng.permutation(OF_LAYER)[:TOP_K] + n * OF_LAYER for n in range(LAYERS)])
        for _ in range(STEPS)
    ]


def test_integer_powers() -> None:
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
    assert run(steps, lambda token: exact(token) // 2)[0].trust.min() > 200  # too low, but right


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
    """What is used sooner stays. Behind its layer, the use in this step no longer counts."""
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
