"""The ghost: the kernels do what the reference does, the reference what a few lines over sets do,
and it misses what a pool with decayed counts misses, whatever the pool itself does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmoe_cli.forecast.shipped import open_trace
from seqmoe_kernels.eviction.expected_use import (
    NUM_WINDOWS,
)
from seqmoe_kernels.eviction.ghost_cache import GhostCache, go_on_reference, size_up_reference
from seqmoe_kernels.state import (
    MISSED_BY_COUNTS,
    MISSED_BY_FORECAST,
    MISSES,
    PoolState,
)
from tests.kernels.eviction.forecast_pool import ForecastPool
from tools.simulator.events import TraceEvents
from tools.simulator.replay import slots_for
from tools.simulator.scores import DecayedFrequency
from tools.simulator.slot_table import SlotTable

CPU = torch.device("cpu")


@pytest.mark.parametrize("slots", [4, 30, 90])
@pytest.mark.parametrize("layers,experts,top_k", [(1, 8, 1), (3, 20, 3), (5, 64, 4)])
def test_kernels_are_the_reference(
    device: torch.device, layers: int, experts: int, top_k: int, slots: int
) -> None:
    """Bit for bit, through an interruption."""
    num = layers * experts
    gen = torch.Generator().manual_seed(slots)
    sides = [ForecastPool(num, top_k, slots, device, by_kernels) for by_kernels in (True, False)]
    used = torch.full((layers * top_k,), num, dtype=torch.int32)
    misses = list[int]()
    weight = torch.rand(layers, experts, generator=gen) ** 3 + 1e-3
    for step in range(16):
        expected = torch.rand(NUM_WINDOWS, num, generator=gen)
        for side in sides:
            if step == 9:
                side.expected_use.steps.zero_()
            side.begin(used.to(device), expected.to(device))
        for got, wanted in zip(sides[0].ghost, sides[1].ghost, strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(sides[0].pool.counters, sides[1].pool.counters)
        ids = torch.multinomial(weight, top_k, generator=gen).int()
        used = (ids + experts * torch.arange(layers)[:, None]).flatten().int()
        for layer in range(layers):
            for side in sides:
                own = used[layer * top_k :][:top_k].to(device)
                side.use(own, layer * experts)
        misses.append(int(sides[0].pool.counters[MISSES]))
    compared = misses[-2] - misses[8] + misses[7]  # those between an interruption and the next
    assert sides[0].pool.counters[MISSED_BY_FORECAST] == compared
    assert sides[0].pool.counters[MISSED_BY_COUNTS] > 0


class Plain:
    """The rule once more, over sets and lists."""

    def __init__(self, slots: int, tick: int) -> None:
        self.slots, self.tick = slots, tick
        self.members: set[int] = set()
        self.score: list[int] = []
        self.edge = 0

    def step(self, used: set[int] | None, held: set[int], usage: list[int], now: int) -> int:
        """What the step before has missed that `used` these; None: there was none."""
        if used is None:
            self.members, self.edge = set(held), 0
        tried = [self.edge + n * (self.tick // 8) for n in range(32)]
        tried += [now - self.tick * n * abs(n) for n in range(-8, 24)]
        before, there = self.edge, self.members | (used or set())
        for edge in tried:
            if sum(usage[e] >= edge for e in there) >= self.slots:
                self.edge = max(self.edge, edge)
        missed = [
            e
            for e in used or ()
            if e not in self.members
            or self.score[e] < before + (self.edge - before) * e // len(usage)
        ]
        self.members = {e for e in there if usage[e] >= self.edge}
        self.score = usage
        return len(missed)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=9, unique=True), max_size=30),
    st.integers(1, 40),
    st.sets(st.integers(0, 30)),
)
def test_a_few_lines_over_sets(steps: list[list[int]], slots: int, breaks: set[int]) -> None:
    counts, ghost = DecayedFrequency(40), GhostCache.unknown(40, CPU)
    pool = PoolState.cold(40, slots, CPU)
    pool.slot_of[::3] = 0
    held = set(range(0, 40, 3))
    plain, used = Plain(slots, counts.tick), set[int]()
    for number, ids in enumerate(steps):
        counts.start_token(number)
        pool.rule.copy_(torch.tensor([counts.tick, counts.now]))
        pool.usage.copy_(torch.from_numpy(counts.score[:-1]))
        is_first, before = number == 0 or number in breaks, int(pool.counters[MISSED_BY_COUNTS])
        hit = torch.zeros(40, dtype=torch.int32)
        hit[list(used)] = 1
        size_up_reference(hit, is_first, pool, ghost)
        go_on_reference(hit, is_first, pool, ghost)
        missed = plain.step(None if is_first else used, held, pool.usage.tolist(), counts.now)
        assert pool.counters[MISSED_BY_COUNTS] - before == missed
        assert set(ghost.member.nonzero().flatten().tolist()) == plain.members
        counts.use(0, np.array(ids))
        used = set(ids)


@pytest.mark.parametrize("percent", [15, 45])
def test_what_decayed_counts_miss(percent: int) -> None:
    """Within two hundredths, of a real routing. What the pool has missed is counted exactly."""
    routing = TraceEvents(open_trace("qwen3"))
    num, layers = routing.num_experts, routing.num_layers
    slots = slots_for(routing.trace, percent)
    counts, by_counts = DecayedFrequency(num), SlotTable(slots, num)
    pool, ghost = PoolState.cold(num, slots, CPU), GhostCache.unknown(num, CPU)
    chance = np.random.default_rng(0)
    none, misses, real = np.empty(0, np.int64), 0, 0
    hit = torch.zeros(num, dtype=torch.int32)
    for step in range(len(routing.trace)):
        counts.start_token(step)
        pool.rule.copy_(torch.tensor([counts.tick, counts.now]))
        pool.usage.copy_(torch.from_numpy(counts.score[:-1]))
        size_up_reference(hit, step == 0, pool, ghost)
        go_on_reference(hit, step == 0, pool, ghost)
        assert pool.counters[MISSED_BY_FORECAST] == real
        found = int(pool.counters[MISSED_BY_COUNTS])
        assert found == pytest.approx(misses, rel=0.02, abs=layers)
        hit.zero_()
        for event in routing.events[step * layers : (step + 1) * layers]:
            misses += len(by_counts.require(event, counts, none)[1])
            counts.use(0, event)
            hit[torch.from_numpy(event)] = 1
        lacked = int(chance.integers(0, 99))
        pool.counters[MISSES] += lacked
        real += lacked
    assert misses > 10 * len(routing.trace)
