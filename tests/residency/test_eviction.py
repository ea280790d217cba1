"""Eviction by a forecast: the switch, and that it finds out what a forecast is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from seqmoe_cli.residency.eviction import (
    COMPARE,
    MIN_MISSES,
    MOST_WINDOW,
    NOTHING,
    RUN,
    WARM_UP,
    WINDOW,
    Eviction,
    EvictionCosts,
    EvictionSwitch,
    Worth,
)
from seqmoe_cli.residency.switch import MOST_REST, REST, SETTLE
from seqmoe_kernels.eviction.expected_use import NUM_WINDOWS, SPAN
from seqmoe_kernels.pool.resolve import resolve_reference
from seqmoe_kernels.state import MISSED_BY_COUNTS, MISSED_BY_FORECAST, MISSES
from tests.kernels.eviction.forecast_pool import ForecastPool

CPU = torch.device("cpu")
PLAIN = EvictionCosts(10, 0, 0, 1e-3, 3e-3)  # without a forecast: a miss takes 0.1 ms


def with_forecast(saved: int, extra_ms: float) -> EvictionCosts:
    """A step that would have had ten misses; the kernels take `extra_ms`."""
    misses = 10 - saved
    stall_s = 1e-4 * misses
    return EvictionCosts(misses, misses, 10, stall_s, 2e-3 + 1e-3 * extra_ms + stall_s)


def run(switch: EvictionSwitch, step: EvictionCosts, prefetches: bool = False) -> int:
    """Steps of this kind until it changes its mind or is done with a window, twice as long as that
    may take at most; those right behind a change do not count, whatever they say."""
    before = switch.is_on, switch.rests
    verdict = switch.verdict
    for number in range(1, 2 * MOST_REST):
        taken = replace(step, step_s=9.0) if switch._settling else step
        switch.observe(taken, prefetches)
        if (switch.is_on, switch.rests) != before or switch.verdict is not verdict:
            return number
    raise AssertionError("it never does")


@pytest.mark.parametrize(
    ("saved", "extra_ms", "pays"),
    [(3, 0.1, True), (3, 0.28, False), (1, 0.05, True), (1, 0.09, False), (8, 0.1, True)],
)
def test_it_pays_if_what_is_saved_is_more_than_what_it_costs(
    saved: int, extra_ms: float, pays: bool
) -> None:
    switch, step = EvictionSwitch(), with_forecast(saved, extra_ms)
    assert run(switch, step) == SETTLE + WINDOW
    assert not switch.is_on and not switch.rests and switch.verdict is None
    assert run(switch, PLAIN) == SETTLE + COMPARE
    assert switch.is_on is pays and switch.rests is not pays and switch.verdict is not None
    assert switch.verdict.saved_misses == saved
    assert switch.verdict.saved_stall_s == pytest.approx(saved * 1e-4)
    assert switch.verdict.saved == pytest.approx(1 - step.step_s / 3e-3)


@pytest.mark.parametrize("saved", [0, -2])
def test_what_saves_nothing_is_not_compared(saved: int) -> None:
    switch = EvictionSwitch()
    run(switch, with_forecast(saved, 0.0))
    assert switch.rests and switch.verdict is not None and switch.verdict.saved_misses == saved


def test_all_misses_saved() -> None:
    """What one takes is known from the steps without."""
    worth = Worth(EvictionCosts(0, 0, 320, 0.0, 64e-3, 32), PLAIN)
    assert worth.saved == pytest.approx(1 / 3) and worth.pays
    assert not Worth(NOTHING).pays and not Worth(EvictionCosts(0, 0, 9, 0.0, 1.0)).pays


def test_rests_grow_until_a_try_pays() -> None:
    switch, bad, good = EvictionSwitch(), with_forecast(1, 0.2), with_forecast(3, 0.1)
    run(switch, bad)
    run(switch, PLAIN)
    for rest in (REST, SETTLE + 2 * REST, SETTLE + 4 * REST):
        assert switch.rests and run(switch, PLAIN) == rest
        assert switch.is_on and run(switch, bad) == WARM_UP + WINDOW  # the cost is still known
    assert run(switch, PLAIN) == SETTLE + 8 * REST
    assert run(switch, good) == WARM_UP + WINDOW and switch.is_on
    run(switch, bad)
    assert switch.rests and run(switch, PLAIN) == SETTLE + REST


def test_window_by_window_until_the_cost_is_measured_again() -> None:
    """Nothing is left out meanwhile, and it ends with the first window that does not pay."""
    switch, good = EvictionSwitch(), with_forecast(3, 0.1)
    run(switch, good)
    assert run(switch, PLAIN) == SETTLE + COMPARE
    run(switch, good)
    windows = [run(switch, good) for _ in range(RUN // WINDOW)]
    assert windows == [WINDOW] * len(windows) and not switch.is_on and not switch.rests
    run(switch, PLAIN)
    run(switch, good)
    run(switch, with_forecast(0, 0.1))
    assert switch.rests


def test_few_misses_take_longer_to_judge() -> None:
    switch, rare = EvictionSwitch(), with_forecast(1, 0.0)
    for number in range(SETTLE + 3 * WINDOW):
        switch.observe(replace(rare, by_forecast=0, by_counts=number % 3 == 0), False)
    assert not switch.is_on and not switch.rests  # 64 of them are enough
    switch = EvictionSwitch()
    assert run(switch, replace(rare, by_forecast=0, by_counts=0)) == SETTLE + MOST_WINDOW
    assert switch.rests and MOST_WINDOW > WINDOW >= MIN_MISSES


def test_steps_with_and_without_prefetch_are_not_compared() -> None:
    """Prefetch has kernels of its own; its comparison with none must not look like a cost."""
    switch, good = EvictionSwitch(), with_forecast(3, 0.1)
    dear = replace(good, step_s=good.step_s + 1e-3)
    run(switch, dear, True)
    assert not switch.is_on
    assert switch.observe(PLAIN, False)  # it does not learn that way what the forecast costs
    run(switch, good, False)
    run(switch, PLAIN, False)
    assert switch.is_on and switch.verdict is not None
    assert switch.verdict.saved == pytest.approx(1 - good.step_s / 3e-3)
    run(switch, dear, True)
    assert not switch.is_on and not switch.rests  # not known for steps with prefetch


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
    num, steps = LAYERS * EXPERTS, 420
    ids, gen = routing(steps + SPAN), torch.Generator().manual_seed(1)
    side = ForecastPool(num, TOP_K, SLOTS, CPU, False)
    eviction = Eviction(side.expected_use, side.ghost)
    used, on = torch.full((LAYERS * TOP_K,), num, dtype=torch.int32), []
    for step in range(steps):
        counters = side.pool.counters.clone()
        on.append(eviction.is_on)
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
        costs = EvictionCosts(took[MISSES], took[MISSED_BY_FORECAST], took[MISSED_BY_COUNTS])
        step_s = 2e-3 + 6e-5 * (expected_use is not None) + stall_s
        eviction.observe(replace(costs, stall_s=stall_s, step_s=step_s), False)
    share, verdict = sum(on) / len(on), eviction.switch.verdict
    assert verdict is not None and verdict.pays is (kind == "truth")
    if kind == "truth":
        assert eviction.status == "on" and share > 0.9
    else:
        first = on.index(False)
        assert first <= SETTLE + WINDOW and share < 0.6
        assert True in on[first + COMPARE + SETTLE + 1 :]  # it is tried again


def test_held() -> None:
    side = ForecastPool(8, 1, 4, CPU, False)
    eviction = Eviction(side.expected_use, side.ghost)
    eviction.hold()
    for _ in range(3 * WINDOW):
        eviction.observe(with_forecast(-5, 9.0), False)
    assert eviction.status == "on" and eviction.expected_use is side.expected_use
