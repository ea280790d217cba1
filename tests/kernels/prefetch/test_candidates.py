"""What is foreseen for a step: which experts are noted, and that they are asked for."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels import StepForecast, read_request
from seqmoe_kernels.prefetch.candidates import (
    pick_candidates,
    pick_candidates_reference,
)
from seqmoe_kernels.state import CERTAIN, LEAST
from tests.kernels.pool_states import EXPERTS, LAYERS, flights_on, make, pool_on
from tests.kernels.prefetch.asking import ask_ahead, predicting

N = LAYERS * EXPERTS


@pytest.mark.parametrize("least", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_the_likeliest_absent_ones(device: torch.device, levels: int, least: float) -> None:
    """Those at least as probable as asked for, no more than there is room for, in their order; of
    equals at the limit none."""
    gen = torch.Generator().manual_seed(levels)
    pool, state = make(30)
    state.rules[LEAST] = int(least * CERTAIN)
    pool.slot_of[torch.randperm(N, generator=gen)[:30]] = 3
    expected = torch.randint(-2, levels + 1, (2, N), generator=gen) / levels
    step = torch.tensor([7])
    kernel_pool, kernel_state = pool_on(pool, device), flights_on(state, device)
    pick_candidates_reference(StepForecast(expected, step), pool, state)
    moved = StepForecast(expected.to(device), step.to(device))
    pick_candidates.launch(moved, kernel_pool, kernel_state)
    assert torch.equal(kernel_state.candidates.cpu(), state.candidates)
    hints = [hint for hint in state.candidates.tolist() if hint >= 0]
    assert hints == sorted(hints) and state.candidates.tolist()[len(hints) :].count(-1) == 16 - len(
        hints
    )
    able = (pool.slot_of < 0) & (expected[1] > 0) & (expected[1] >= least)
    chance = torch.where(able, expected[1], -1.0)
    limit = chance.sort(descending=True).values[16]
    assert hints == (chance > max(float(limit), 0.0)).nonzero().flatten().tolist()


def test_candidates_of_later_layers_are_asked_for_behind_predictions() -> None:
    pool, state = make(20, in_flight=4, per_layer=4)
    expected = torch.zeros(1, N)
    wanted = [EXPERTS + 5, 4 * EXPERTS + 2, 5 * EXPERTS + 3, 5 * EXPERTS + 9]
    expected[0, wanted] = 0.9
    pick_candidates(StepForecast(expected), pool, state)
    assert state.candidates.tolist()[:5] == [*wanted, -1]
    ask_ahead(pool, state, predicting([], [7]), use_candidates=True)
    got = [read_request(state.requests, n) for n in range(4)]
    assert [r and (r.expert, r.event) for r in got] == [
        (2 * EXPERTS + 7, 3),
        (5 * EXPERTS + 3, 6),
        (5 * EXPERTS + 9, 6),
        None,
    ]
