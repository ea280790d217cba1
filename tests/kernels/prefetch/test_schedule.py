"""Which prefetches are asked for, and how look-ahead is judged."""

from __future__ import annotations

import torch

from seqmoe_kernels import read_request
from seqmoe_kernels.prefetch.lookahead import FEW_PREDICTIONS
from seqmoe_kernels.state import (
    CERTAIN,
    COPY_NS,
    LAYER_NS,
    LEAST,
    MISSING,
    PREDICTED,
    PREFETCH_HITS,
    PREFETCHES,
    RIGHT,
)
from tests.kernels.pool_states import EXPERTS, make
from tests.kernels.prefetch.asking import ask_ahead, predicting


def test_the_earliest_event_first_and_no_more_than_allowed() -> None:
    pool, state = make(20, in_flight=3, per_layer=2)
    ask_ahead(pool, state, predicting([], [5, 6], [7]))
    got = [read_request(state.requests, n) for n in range(3)]
    assert [r and (r.expert, r.event) for r in got] == [
        (2 * EXPERTS + 5, 3),
        (2 * EXPERTS + 6, 3),
        None,
    ]
    ask_ahead(pool, state, predicting([1], [5, 8]), layer=1)
    third, fourth = (read_request(state.requests, n) for n in (2, 3))
    assert third and (third.expert, third.event) == (2 * EXPERTS + 1, 3) and fourth is None


def test_what_cannot_land_in_time_is_not_asked_for() -> None:
    pool, state = make(20, in_flight=4, per_layer=4)
    state.rules[LAYER_NS], state.rules[COPY_NS] = 100, 150
    ask_ahead(pool, state, predicting([1], [2, 3], [4, 5]))
    got = [read_request(state.requests, n) for n in range(3)]
    assert [r and r.expert for r in got] == [2 * EXPERTS + 2, 3 * EXPERTS + 4, None]


def test_predictions_are_asked_for_while_enough_of_them_are_right() -> None:
    """Each distance for itself; a few say nothing yet."""
    layers = range(2, 6)
    for num_predicted, num_right, expected in (
        (FEW_PREDICTIONS - 1, 0, [*layers]),
        (FEW_PREDICTIONS, FEW_PREDICTIONS // 2 - 1, [3, 4, 5]),
        (2 * FEW_PREDICTIONS, FEW_PREDICTIONS, [*layers]),
    ):
        pool, state = make(20, in_flight=4, per_layer=4)
        state.rules[LEAST] = CERTAIN // 2
        state.accuracy[0, [PREDICTED, RIGHT]] = torch.tensor([num_predicted, num_right])
        ask_ahead(pool, state, predicting([1], [1], [1], [1]), layer=1)
        got = [read_request(state.requests, n) for n in range(4)]
        assert [r.expert for r in got if r] == [layer * EXPERTS + 1 for layer in expected]
        assert (state.predicted[layers, range(4), 0] >= 0).all()  # judged all the same


def test_rules_of_zero_ask_for_nothing() -> None:
    pool, state = make(20, in_flight=0)
    ask_ahead(pool, state, predicting([1], [2, 3], [4, 5]))
    assert read_request(state.requests, 0) is None and pool.counters[PREFETCHES] == 0


def test_accuracy_counts_would_be_misses() -> None:
    pool, state = make(20)
    ask_ahead(pool, state, predicting([0, 1, 7]))
    pool.landed_tag.copy_(pool.assigned_tag)
    ask_ahead(pool, state, predicting(), layer=1)  # wants 0 and 1, which are there in time, and 2
    assert state.accuracy[0, [MISSING, PREDICTED, RIGHT]].tolist() == [3, 3, 2]
    assert pool.counters[PREFETCH_HITS] == 2
    assert state.accuracy[1:].sum() == 0  # nothing was seen from further away
