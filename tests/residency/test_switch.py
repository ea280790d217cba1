"""The switch: it compares steps with and without, and turns off what does not pay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seqmoe_cli.residency.eviction import LENGTHS
from seqmoe_cli.residency.stats import StepStats
from seqmoe_cli.residency.switch import (
    REST,
    EvictionVerdict,
    Lengths,
    PrefetchVerdict,
    Switch,
)

SHORT = Lengths()


def prefetching(copies: int, uses: int, stall_ms: float, compute_ms: float = 2.0) -> StepStats:
    """A step that lacks ten experts."""
    return StepStats(
        "decode", 1, misses=10 - uses, prefetch_hits=uses, prefetches=copies,
        stall_s=stall_ms * 1e-3, step_s=(compute_ms + stall_ms) * 1e-3,
    )  # fmt: skip


def without(absent: int = 10) -> StepStats:
    """Computing takes 2 ms, a miss 0.1."""
    stall_s = 1e-4 * absent
    return StepStats("decode", 1, misses=absent, stall_s=stall_s, step_s=2e-3 + stall_s)


def forecasting(saved: int, extra_ms: float) -> StepStats:
    """A step that would have had ten misses; the kernels of the forecast take `extra_ms`."""
    misses, compute_s = 10 - saved, 2e-3 + 1e-3 * extra_ms
    return replace(
        without(misses), step_s=compute_s + 1e-4 * misses, missed_by_forecast=misses,
        missed_by_counts=10,
    )  # fmt: skip


def prefetch_switch() -> Switch[PrefetchVerdict]:
    return Switch(lambda on, off: PrefetchVerdict.of(on, off, 1.0))


def observed(switch: Switch, step: StepStats, count: int, settle: int = SHORT.settle) -> bool:  # type: ignore[type-arg]
    """Whether it is on after so many steps that count; it does not change before. What those behind
    a change take does not matter."""
    before = switch.is_on
    assert [switch.observe(replace(step, step_s=9.0)) for _ in range(settle)] == [before] * settle
    assert [switch.observe(step) for _ in range(count - 1)] == [before] * (count - 1)
    return switch.observe(step)


@pytest.mark.parametrize(
    ("copies", "uses", "stall_ms", "compute_ms", "pays"),
    [
        (8, 6, 0.5, 2.0, True),
        (8, 6, 0.5, 2.6, False),  # what it saves is less than what its kernels take
        (8, 6, 1.2, 2.0, False),  # copies slow the fetches down
        (9, 2, 0.5, 2.0, False),  # too many bytes
    ],
)
def test_prefetch_is_compared_with_none(
    copies: int, uses: int, stall_ms: float, compute_ms: float, pays: bool
) -> None:
    """Ten experts are absent in a step that is tried, five in one that it is compared with."""
    switch, took = prefetch_switch(), prefetching(copies, uses, stall_ms, compute_ms)
    assert not observed(switch, took, SHORT.tried)
    assert switch.status == "comparing"
    assert observed(switch, without(5), SHORT.plain) is pays
    assert switch.status == ("on" if pays else "resting") and switch.verdict is not None
    assert switch.verdict.without_s == pytest.approx(SHORT.tried * 3e-3)
    if pays:  # it goes on, and is compared again
        assert not observed(switch, took, SHORT.run)


def test_rests_grow_until_a_try_pays() -> None:
    switch, useless, good = prefetch_switch(), prefetching(8, 0, 1.0), prefetching(8, 6, 0.0)
    for rest in (REST, 2 * REST, 4 * REST):
        assert not observed(switch, useless, SHORT.tried)
        assert not observed(switch, without(), SHORT.plain)
        assert observed(switch, without(), rest, settle=0)
    assert not observed(switch, good, SHORT.tried)
    assert observed(switch, without(), SHORT.plain)
    assert not observed(switch, useless, SHORT.run)
    assert not observed(switch, without(), SHORT.plain)
    assert observed(switch, without(), REST, settle=0)


def test_a_try_without_copies_does_not_pay() -> None:
    """Whatever the clock says: nothing was saved, and its kernels cost something."""
    switch = prefetch_switch()
    assert not observed(switch, prefetching(0, 0, 0.0, 1.0), SHORT.tried)
    assert not observed(switch, without(), SHORT.plain)
    assert switch.rests and switch.verdict is not None
    assert switch.verdict.saved > 0 and switch.verdict.copies_per_use is None


@pytest.mark.parametrize(
    ("saved", "extra_ms", "pays"),
    [(3, 0.1, True), (3, 0.28, False), (1, 0.05, True), (1, 0.09, False), (0, 0.0, False)],
)
def test_a_forecast_pays_if_it_saves_more_than_it_costs(
    saved: int, extra_ms: float, pays: bool
) -> None:
    switch, step = Switch(EvictionVerdict, LENGTHS), forecasting(saved, extra_ms)
    assert not observed(switch, step, LENGTHS.tried)
    assert observed(switch, without(), LENGTHS.plain) is pays
    assert switch.rests is not pays and switch.verdict is not None
    assert switch.verdict.saved_misses == saved
    assert switch.verdict.saved_stall_s == pytest.approx(saved * 1e-4)
    assert switch.verdict.saved == pytest.approx(1 - step.step_s / 3e-3)


def test_all_misses_saved() -> None:
    """What one takes is known from the steps without."""
    worth = EvictionVerdict(forecasting(10, 0.0), without())
    assert worth.saved == pytest.approx(1 / 3) and worth.pays
    nothing = StepStats("decode")
    assert not EvictionVerdict(nothing, nothing).pays


def test_steps_of_two_regimes_are_not_compared() -> None:
    """Prefetch has kernels of its own; its comparison with none must not look like a cost of the
    forecast, and while it compares nothing counts."""
    switch, good = Switch(EvictionVerdict, LENGTHS), forecasting(3, 0.1)
    dear = replace(good, step_s=good.step_s + 1e-3)
    for _ in range(LENGTHS.settle + LENGTHS.tried - 1):
        assert switch.observe(dear, "on")
    for _ in range(SHORT.plain):
        assert switch.observe(good, "comparing")
    assert switch.observe(good, "resting")  # it begins again
    for _ in range(LENGTHS.tried - 2):
        assert switch.observe(good, "resting")
    assert not switch.observe(good, "resting")
    for _ in range(LENGTHS.settle + LENGTHS.plain):
        switch.observe(without(), "resting")
    assert switch.is_on and switch.verdict is not None
    assert switch.verdict.saved == pytest.approx(1 - good.step_s / 3e-3)


def test_held_it_stays_on() -> None:
    switch = prefetch_switch()
    switch.is_held = True
    assert all(switch.observe(prefetching(8, 0, 9.0)) for _ in range(3 * SHORT.run))
    assert switch.status == "on"
