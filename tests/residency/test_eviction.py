"""Eviction by a forecast finds out what the forecast is worth."""

from __future__ import annotations

import pytest
import torch

from seqmoe_cli.residency.eviction import LENGTHS, Eviction
from seqmoe_cli.residency.stats import StepStats
from seqmoe_kernels.eviction.expected_use import NUM_WINDOWS, SPAN
from seqmoe_kernels.pool.resolve import resolve_reference
from seqmoe_kernels.state import MISSED_BY_COUNTS, MISSED_BY_FORECAST, MISSES
from tests.kernels.eviction.forecast_pool import ForecastPool

LAYERS, EXPERTS, TOP_K, SLOTS = 4, 24, 3, 30


def routing(steps: int) -> torch.Tensor:
    """Ids [steps, L, K] that come again now and then."""
    gen = torch.Generator().manual_seed(0)
    weight = torch.rand(LAYERS, EXPERTS, generator=gen) ** 2 + 0.05
    ids = torch.stack([torch.multinomial(weight, TOP_K, generator=gen) for _ in range(steps)])
    return (ids + EXPERTS * torch.arange(LAYERS)[:, None]).int()


@pytest.mark.parametrize("kind", ["truth", "noise", "contrary"])
def test_a_good_forecast_stays_and_a_worthless_one_goes(kind: str) -> None:
    """A real pool and its ghost; the clock is made up: computing takes 2 ms, the kernels of a
    forecast 0.06 more, a miss 0.1."""
    num, steps = LAYERS * EXPERTS, 620
    ids, gen = routing(steps + SPAN), torch.Generator().manual_seed(1)
    side = ForecastPool(num, TOP_K, SLOTS, torch.device("cpu"), False)
    eviction = Eviction(side.expected_use, side.ghost)
    used, on = torch.full((LAYERS * TOP_K,), num, dtype=torch.int32), []
    for step in range(steps):
        counters = side.pool.counters.clone()
        on.append(eviction.switch.is_on)
        expected_use = eviction.expected_use
        if expected_use is None:
            side.tick()
        else:
            truth = torch.zeros(NUM_WINDOWS, num)
            for w in range(NUM_WINDOWS):
                for ahead in range(1 << w >> 1, 1 << w):
                    truth[w, ids[step + ahead].flatten().long()] += 1
            noise = torch.rand(NUM_WINDOWS, num, generator=gen)
            side.begin(used, {"truth": truth, "noise": noise, "contrary": 1 - truth}[kind])
        for layer in range(LAYERS):
            resolve_reference(ids[step, layer], side.pool, None, expected_use, layer * EXPERTS)
        used = ids[step].flatten()
        took = (side.pool.counters - counters).tolist()
        stall_s = 1e-4 * took[MISSES]
        costs = StepStats(
            "decode", 1, misses=took[MISSES], missed_by_forecast=took[MISSED_BY_FORECAST],
            missed_by_counts=took[MISSED_BY_COUNTS], stall_s=stall_s,
            step_s=2e-3 + 6e-5 * (expected_use is not None) + stall_s,
        )  # fmt: skip
        eviction.observe(costs, "off")
    share, verdict = sum(on) / len(on), eviction.switch.verdict
    assert verdict is not None and verdict.pays is (kind == "truth")
    if kind == "truth":
        assert eviction.status == "on" and share > 0.9
    else:
        first = on.index(False)
        assert first == LENGTHS.settle + LENGTHS.tried and share < 0.7
        assert True in on[first + LENGTHS.plain + LENGTHS.settle :]  # it is tried again
