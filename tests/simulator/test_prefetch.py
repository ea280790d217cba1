"""Prefetch in a replay: accuracy of what is simulated, what perfect knowledge gives, and a table
that stays whole whatever is prefetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from seqmoe_cli.forecast.shipped import open_trace
from seqmoe_cli.residency.policies import ONE
from tests.traces import random_trace
from tools.simulator.events import TraceEvents
from tools.simulator.flight import Flight, PrefetchRules
from tools.simulator.forecast_eviction import Blend, ForecastEviction
from tools.simulator.forecasts import Blurred, Decayed, Persistence, Popularity
from tools.simulator.link import PREFETCH_BY, Copy, Link, LinkClock, clock_of
from tools.simulator.policies import belady, lru
from tools.simulator.prefetch import Candidates, FullPrefetch, LookAhead, OraclePrefetch
from tools.simulator.replay import replay
from tools.simulator.slot_table import SlotTable

FAST = Link(fetch_bytes_per_s=1e15, dma_bytes_per_s=1e15, launch_s=0.0, delay_s=0.0)
SLOW = {
    "gpu": Link(delay_s=1.1e-3, layer_s=1e-4),  # a copy begins when 11 layers have passed
    "thread": Link(prefetch_by="thread", delay_s=0.0, layer_s=1e-6),  # and takes as long as 90
}
by_both = pytest.mark.parametrize("by", PREFETCH_BY)


def routing() -> TraceEvents:
    return TraceEvents(open_trace("qwen3"))


@pytest.mark.parametrize(("recall", "precision"), [(0.9, 0.6), (0.5, 0.33), (1.0, 1.0)])
def test_blurred_truth_has_the_accuracy_that_is_asked_for(recall: float, precision: float) -> None:
    real = routing()
    forecast = Blurred(real, [recall] * 4, [precision] * 4, rare=1.0)
    events = real.events.reshape(-1, real.num_layers, real.trace.top_k)
    named = [set(forecast.named(step, 0).tolist()) for step in range(20, len(events))]
    used = [set(step.ravel().tolist()) for step in events[20:]]
    right = sum(len(a & b) for a, b in zip(named, used, strict=True))
    assert right / sum(map(len, used)) == pytest.approx(recall, abs=0.02)
    assert right / sum(map(len, named)) == pytest.approx(precision, abs=0.03)
    assert forecast(5)[0].max() == round(precision * ONE)


def test_rare_experts_are_foreseen_less() -> None:
    real = routing()
    forecast = Blurred(real, [0.8] * 4, [0.6] * 4, rare=0.5)
    steps = real.events.reshape(129, -1)
    named, right, used = np.zeros((3, 2))
    for step in range(70, 129):
        recent = np.zeros(real.num_experts, bool)
        recent[steps[step - 64 : step].ravel()] = True
        names = forecast.named(step, 0)
        for i, group in enumerate((recent, ~recent)):
            named[i] += group[names].sum()
            right[i] += np.isin(steps[step], names)[group[steps[step]]].sum()
            used[i] += group[steps[step]].sum()
    assert right / used == pytest.approx([0.8, 0.4], abs=0.05)
    assert right[0] / named[0] == pytest.approx(0.6, abs=0.05)
    assert right[1] / named[1] < 0.45


def test_what_is_named_from_afar_is_named_from_nearer() -> None:
    forecast = Blurred(routing(), [0.9, 0.6, 0.5, 0.4], [0.5] * 4)
    events = routing().events.reshape(129, -1)
    far, near = (set(forecast.named(30, window)) & set(events[30]) for window in (3, 0))
    assert far < near


def test_look_ahead_has_the_accuracy_that_is_asked_for() -> None:
    """Against the misses of a pool in which every third expert has no slot."""
    real = routing()
    look_ahead = LookAhead(real, [(0.8, 0.7), (0.6, 0.4)])
    absent = np.arange(real.num_experts) % 3 == 0
    named, right, missed = np.zeros((3, 2))
    for event in range(len(real.events) - 2):
        missing = [set(e[absent[e]].tolist()) for e in real.events[event + 1 : event + 3]]
        found = look_ahead.candidates(event, absent)
        look_ahead.missed(event, int(absent[real.events[event]].sum()))
        if event % 48 > 45 or event < 480:
            continue
        for ahead in (1, 2):
            names = set(found.experts[found.due == event + ahead].tolist())
            named[ahead - 1] += len(names)
            right[ahead - 1] += len(names & missing[ahead - 1])
            missed[ahead - 1] += len(missing[ahead - 1])
    assert right / missed == pytest.approx([0.8, 0.6], abs=0.02)
    assert right / named == pytest.approx([0.7, 0.4], abs=0.04)
    assert not len(look_ahead.candidates(47, absent).experts)  # not into the next token


def test_counts_forecast_what_they_have_seen() -> None:
    real = TraceEvents(random_trace(2, 30, 3, 10, 2))
    steps = real.events.reshape(30, -1)
    assert set(np.flatnonzero(Persistence(real)(7)[0])) == set(steps[6])
    popular = Popularity(real)(20)
    assert popular[0].tolist() == [int((steps[:20] == e).sum()) * ONE // 20 for e in range(30)]
    assert popular[3].tolist() == (4 * popular[0]).tolist()
    decayed = Decayed(real, 4.0)(20)[0] / ONE
    exact = [
        sum(2 ** (-(20 - n) / 4) for n in range(20) if e in steps[n]) * (1 - 2 ** (-1 / 4))
        for e in range(30)
    ]
    assert decayed == pytest.approx(exact, abs=0.01)
    assert not Persistence(real)(0).any() and not Popularity(real)(0).any()


@pytest.mark.parametrize(("by", "top_k"), [("gpu", 1), ("thread", 3)])  # asked for by an event
def test_who_knows_the_future_misses_nothing_but_the_first_event(by: str, top_k: int) -> None:
    real = TraceEvents(random_trace(1, 40, 6, 20, top_k))
    rules = PrefetchRules(OraclePrefetch(real), in_flight=64, budget=10_000)
    done = replay(real, 60, belady, replace(FAST, prefetch_by=by), rules)
    assert done.loads.sum() == done.loads[0, 0] == top_k
    assert done.used.sum() == done.copies.sum() > 0
    assert done.hit_rate(slice(1, None)) == 1


@by_both
def test_nothing_is_asked_for_that_cannot_be_in_time(by: str) -> None:
    real = TraceEvents(random_trace(1, 40, 6, 20, 3))
    done = replay(real, 60, lru, SLOW[by], PrefetchRules(OraclePrefetch(real)))
    assert done.copies.sum() == 0
    assert done.loads.tolist() == replay(real, 60, lru).loads.tolist()


@pytest.mark.parametrize(("by", "most"), [("gpu", 1), ("thread", 2)])
def test_copies_are_asked_for_behind_one_of_several_layers(by: str, most: int) -> None:
    real = TraceEvents(random_trace(1, 40, 6, 20, 3))
    link = replace(FAST, prefetch_by=by)
    often, seldom = (
        replay(
            real, 60, belady, link, PrefetchRules(OraclePrefetch(real), in_flight=2, every=every)
        )
        for every in (1, 3)
    )
    assert 0 < seldom.copies.max() <= 2 * most < often.copies.max()  # two layers of six


def test_a_late_copy_is_a_miss() -> None:
    """Half a fetch of lateness is allowed: such copies are waited for, and shorten the stall."""
    real = routing()
    link = Link(layer_s=15e-6, prefetch_by="thread", delay_s=0.0)
    rules = PrefetchRules(LookAhead(real, [(1.0, 1.0)] * 6), in_flight=2)
    strict, loose = (
        replay(real, 1536, lru, replace(link, slack=slack), rules) for slack in (0.0, 0.9)
    )
    on_demand = replay(real, 1536, lru, link)
    assert loose.late.sum() > 0
    assert loose.stall_s.sum() < strict.stall_s.sum() <= on_demand.stall_s.sum()
    hits = loose.loads.size * loose.top_k - loose.loads.sum() - loose.late.sum()
    assert loose.hit_rate(slice(None)) == pytest.approx(hits / (loose.loads.size * loose.top_k))


def test_a_copy_in_part_is_worth_having() -> None:
    """Two layers of two experts, one each, the second always missing: the first layer takes 4 s, of
    which 1 is the delay, a record 10. By hand: 2 s of launch, and 7 that are left to copy."""
    trace = random_trace(0, 3, 2, 2, 1)
    trace = replace(trace, experts=np.array([[[0], [0]], [[0], [1]], [[0], [0]]], np.uint8))
    real = TraceEvents(trace)
    link = Link(100, layer_s=4.0, fetch_bytes_per_s=10.0, launch_s=2.0, delay_s=1.0)
    done = replay(real, 3, lru, link, PrefetchRules(LookAhead(real, [(1.0, 1.0)])))
    assert done.loads.tolist() == [[1, 0], [0, 0], [0, 0]]
    assert done.late.tolist() == [[0, 1], [0, 1], [0, 0]]
    assert done.stall_s.tolist() == pytest.approx([12 + 2 + 7, 2 + 7, 0])
    assert done.copies.tolist() == [1, 1, 0] and not done.unmoved.any()


class WrongPrefetch:
    """Names expert 1 of two for the next event, which wants the other one."""

    def missed(self, event: int, num: int) -> None:
        pass

    def candidates(self, event: int, absent: NDArray[np.bool_]) -> Candidates:
        named = np.array([1])[absent[[1]]]
        return Candidates(named, np.full(len(named), ONE), np.full(len(named), event + 1))


def test_a_copy_that_nobody_wanted_counts_as_far_as_it_came() -> None:
    trace = replace(random_trace(0, 4, 1, 2, 1), experts=np.zeros((4, 1, 1), np.uint8))
    link = Link(100, layer_s=4.0, fetch_bytes_per_s=10.0, launch_s=2.0, delay_s=1.0)
    done = replay(trace, 3, lru, link, PrefetchRules(WrongPrefetch()))
    assert done.stall_s.tolist() == [12, 0, 0, 0]
    assert done.copies.tolist() == [1, 1, 1, 1] and not done.used.any()
    assert done.unmoved.tolist() == pytest.approx([0.7, 0.7, 0.7, 0])  # the last one: under way
    assert done.loads_per_token(slice(0, 3)) == pytest.approx((1 + 3 * 0.3) / 3)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(PREFETCH_BY), st.integers(0, 999), st.integers(1, 4),
    st.sampled_from([1e-6, 3e-5, 1e-3]),
)  # fmt: skip
def test_true_names_without_delay_are_never_slower(
    by: str, seed: int, in_flight: int, layer_s: float
) -> None:
    """In a pool for all experts: nothing is evicted for a copy."""
    real = TraceEvents(random_trace(seed, 12, 4, 6, 3))
    link = Link(layer_s=layer_s, launch_s=0.0, prefetch_by=by, delay_s=0.0)
    rules = PrefetchRules(OraclePrefetch(real), in_flight=in_flight)
    done, without = (replay(real, 24, lru, link, r) for r in (rules, None))
    assert done.stall_s.sum() <= without.stall_s.sum() + 1e-12
    assert done.loads.sum() + done.copies.sum() == without.loads.sum()  # nothing comes twice


@by_both
@pytest.mark.parametrize("source", ["lookahead", "full"])
def test_prefetch_turns_misses_into_hits(source: str, by: str) -> None:
    real = routing()
    blend = Blend(real.num_experts, Blurred(real, [0.7] * 4, [0.5] * 4))
    look_ahead = LookAhead(real, [(0.75, 0.68), (0.67, 0.55), (0.61, 0.46), (0.57, 0.4)])
    full = FullPrefetch(real, look_ahead, blend, 0.25)
    rules = PrefetchRules(look_ahead if source == "lookahead" else full, in_flight=2)
    link = Link(prefetch_by=by, delay_s=30e-6)
    done = replay(
        real, 2764, lambda *_: ForecastEviction(real.num_layers, blend), link, rules, blend
    )
    on_demand = replay(real, 2764, lru)
    counted = slice(64, None)
    assert done.hit_rate(counted) > on_demand.hit_rate(counted) + 0.005
    assert done.stall_s[counted].sum() < on_demand.stall_s[counted].sum()
    assert 0 < done.used.sum() <= done.copies.sum()
    assert done.copies.max() <= rules.budget


class AnyPrefetch:
    """Names absent experts at random, for events at random."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def missed(self, event: int, num: int) -> None:
        pass

    def candidates(self, event: int, absent: NDArray[np.bool_]) -> Candidates:
        experts = self._rng.permutation(np.flatnonzero(absent))[:4]
        due = event + self._rng.integers(1, 9, len(experts))
        return Candidates(experts, self._rng.integers(1, ONE, len(experts)), due)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(PREFETCH_BY), st.integers(0, 999), st.integers(3, 24),
    st.sampled_from([1e-6, 3e-5, 1e-3]), st.sampled_from([0.0, 9e-5]),
)  # fmt: skip
def test_the_table_stays_whole(
    by: str, seed: int, num_slots: int, layer_s: float, delay_s: float
) -> None:
    real = TraceEvents(random_trace(seed, 12, 4, 6, 3))
    policy, table = lru(real, num_slots), SlotTable(num_slots, real.num_experts)
    clock = clock_of(Link(layer_s=layer_s, prefetch_by=by, delay_s=delay_s, slack=0.9))
    rules = PrefetchRules(AnyPrefetch(seed), in_flight=3, least=0.0)
    flight = Flight(table, clock, policy, rules, 3)
    flight.start_token(0)
    for event, wanted in enumerate(real.events):
        flight.land()
        waiting = flight.late(wanted)
        kept = flight.barred()
        owners = table.owner[kept].tolist()
        late = np.array([copy.expert for copy in waiting], np.int64)
        _, loads = table.require(np.setdiff1d(wanted, late), policy, kept)
        assert table.owner[kept].tolist() == owners  # nothing under way was given away
        clock.fetch(len(loads))
        clock.wait(waiting)
        flight.land()
        assert_whole(table, wanted.tolist(), clock)
        flight.passed(event, wanted, np.concatenate((late, loads)))
        assert_empty(table, flight.cut(event))
        assert_whole(table, wanted.tolist(), clock)
        policy.use(0, wanted)
        flight.request(event, wanted)
        assert_whole(table, wanted.tolist(), clock)
        clock.run(clock.now + layer_s)


def assert_empty(table: SlotTable, ended: Sequence[Copy]) -> None:
    """What was cut short has left its slot, and can be asked for again."""
    for copy in ended:
        assert 0 < copy.left <= 1
        assert (table.owner[copy.slot], table.slot_of[copy.expert]) == (-1, -1)


def assert_whole(table: SlotTable, wanted: Sequence[int], clock: LinkClock) -> None:
    """Table and owners agree, the wanted have slots, a slot under way is in no expert's name."""
    held = np.flatnonzero(table.slot_of >= 0)
    assert table.owner[table.slot_of[held]].tolist() == held.tolist()
    assert (table.slot_of[list(wanted)] >= 0).all()
    under_way = {copy.slot for copy in (*clock.copies, *clock.landed)}
    assert not under_way & set(table.slot_of[held].tolist())
