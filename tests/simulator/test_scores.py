"""Scores of the policies: against the sums that they stand for, and what they decide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmoe_cli.residency.policies import CLOCK_START, DOUBLING
from tools.simulator.scores import DecayedFrequency, Lru, log2_sum

NONE = np.empty(0, np.int64)


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


def test_integer_logarithms() -> None:
    score = np.array([0, CLOCK_START - DOUBLING, CLOCK_START, CLOCK_START + 3 * DOUBLING])
    doublings = (log2_sum(score, CLOCK_START) - CLOCK_START) / DOUBLING
    assert doublings == pytest.approx([0, np.log2(1.5), 1, np.log2(9)], abs=0.002)
    assert log2_sum(score, CLOCK_START)[0] == CLOCK_START  # never used counts as nothing at all
