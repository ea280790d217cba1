"""The kernels beside a step: the lock, asking, copying; kernels against references."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels import (
    AllCopied,
    Flights,
    Handover,
    Predictions,
    RecordedIds,
    Routing,
    Signals,
)
from seqmoe_kernels.eviction.expected_use import ExpectedUse
from seqmoe_kernels.pool.choose import choose
from seqmoe_kernels.pool.fetch import BLOCK_WORDS, fetch
from seqmoe_kernels.pool.lock import COPY_PROGRAMS, FREE, HELD, layer_at_reference
from seqmoe_kernels.prefetch.candidates import StepForecast, pick_candidates_reference
from seqmoe_kernels.prefetch.copy_kernels import copy_prefetches, copy_reference
from seqmoe_kernels.prefetch.schedule import schedule_prefetches, schedule_reference
from seqmoe_kernels.state import (
    CUT_BYTES,
    DROPPED,
    FETCHING,
    LANDED,
    LEAST,
    NO_VICTIM,
    PREFETCH_HITS,
    PREFETCHES,
)
from tests.kernels.pool_states import (
    CPU,
    DISTANCES,
    EXPERTS,
    LAYERS,
    NAMES,
    TOP_K,
    invariants,
    make,
    pool_on,
)
from tests.kernels.pool_states import assert_same as assert_same_state

RECORD = 4 * 3 * BLOCK_WORDS * COPY_PROGRAMS // 2 + 64  # uneven among programs


class Side:
    """A pool that is served by a handover, on one device, by kernels or by references."""

    def __init__(self, num_slots: int, device: torch.device, by_kernels: bool) -> None:
        self.device, self.by_kernels = device, by_kernels
        pool, flights = make(num_slots)
        on_device = Flights.none(LAYERS, TOP_K, DISTANCES, NAMES, device, beside=True)
        on_device.rules.copy_(flights.rules)
        self.pool, self.flights = pool_on(pool, device), on_device
        self.handover = Handover.idle(LAYERS, EXPERTS, TOP_K, DISTANCES, device)
        records = torch.arange(LAYERS * EXPERTS).byte()[:, None].repeat(1, RECORD)
        self.records = records.pin_memory() if device.type == "cuda" else records
        self.slots = torch.zeros(num_slots, RECORD, dtype=torch.uint8, device=device)
        self.expected_use: ExpectedUse | None = None

    def event(self, layer: int, logits: torch.Tensor) -> torch.Tensor:
        """The choice of a layer and its fetch; what its experts' kernel would read [K]."""
        run_choose = choose.launch if self.by_kernels else choose.reference
        run_fetch = fetch.launch if self.by_kernels else fetch.reference
        chosen = run_choose(
            logits.to(self.device), layer, Routing(EXPERTS, TOP_K, True), self.pool, None,
            self.flights, self.expected_use, self.handover.used, self.handover,
        )  # fmt: skip
        all_copied = AllCopied(self.flights.control, self.pool.clock, self.flights.arrived)
        signals = Signals(all_copied, self.handover.free_behind(layer))
        run_fetch(self.records, self.slots, chosen.resolved, self.pool.marks, signals)
        places = chosen.resolved.slots.long()
        assert (self.slots[places] == chosen.wanted[:, None]).all()
        return chosen.wanted.cpu()

    def ask(self, predictions: Predictions) -> None:
        (schedule_prefetches.launch if self.by_kernels else schedule_reference)(
            predictions, self.pool, self.flights, self.handover, self.expected_use
        )

    def copy(self) -> None:
        (copy_prefetches.launch if self.by_kernels else copy_reference)(
            self.records, self.slots, self.pool, self.flights, self.handover
        )


def assert_same(side: Side, expected: Side) -> None:
    assert_same_state(side.pool, side.flights, expected.pool, expected.flights)
    for name, tensor in expected.handover._asdict().items():
        assert torch.equal(getattr(side.handover, name).cpu(), tensor), name
    ready = (expected.pool.owner >= 0) & (expected.pool.state != FETCHING)
    assert torch.equal(side.slots.cpu()[ready], expected.slots[ready])


@pytest.mark.parametrize("num_slots,hinted", [(9, False), (25, False), (25, True)])
@pytest.mark.parametrize("seed", [0])
def test_random_steps(device: torch.device, num_slots: int, hinted: bool, seed: int) -> None:
    """Exact equality of everything. Now and then nothing is asked behind a layer, nothing copied,
    or not before the event is over."""
    gen = torch.Generator().manual_seed(seed)
    sides = Side(num_slots, CPU, False), Side(num_slots, device, True)
    predictions = Predictions(EXPERTS, NAMES - 1, None, hinted)
    for _ in range(2):
        if hinted:
            expected = torch.rand(1, LAYERS * EXPERTS, generator=gen)
            for side in sides:
                moved = StepForecast(expected, torch.zeros(1, dtype=torch.int64))
                pick_candidates_reference(moved, sides[0].pool, sides[0].flights)
                side.flights.candidates.copy_(sides[0].flights.candidates)
        for layer in range(LAYERS):
            seen = min(DISTANCES, LAYERS - 1 - layer)
            logits = torch.randn(1, (1 + seen) * EXPERTS, generator=gen)
            luck = torch.rand(2, generator=gen) < 0.8
            wanted = [side.event(layer, logits) for side in sides]
            assert torch.equal(*wanted)
            for side in sides:
                if luck[0] or layer == LAYERS - 1:
                    side.ask(predictions)
                if luck[1] or layer == LAYERS - 1:
                    side.copy()
            assert_same(sides[1], sides[0])
            invariants(sides[0].pool, sides[0].flights)
        under_way = sides[0].pool.state == FETCHING
        tags = sides[0].pool.landed_tag.abs() == sides[0].pool.assigned_tag
        assert tags[under_way].all(), "something is left behind after the last layer"
    counters = sides[0].pool.counters
    assert counters[PREFETCHES] > 3 and counters[NO_VICTIM] == 0 and counters[LANDED] > 0
    assert counters[PREFETCH_HITS] + counters[DROPPED] > 0


def test_asked_once_behind_an_event(device: torch.device) -> None:
    side = Side(25, device, True)
    side.event(0, torch.randn(1, 5 * EXPERTS, generator=torch.Generator().manual_seed(0)))
    assert int(side.handover.lock) & FREE
    side.ask(Predictions(EXPERTS, NAMES))
    assert not int(side.handover.lock) & (FREE | HELD)
    before = int(side.flights.number)
    side.ask(Predictions(EXPERTS, NAMES))
    assert int(side.flights.number) == before > 0


def test_nothing_is_asked_for_behind_the_last_layer(device: torch.device) -> None:
    side = Side(25, device, True)
    side.event(LAYERS - 1, torch.randn(1, EXPERTS, generator=torch.Generator().manual_seed(0)))
    side.ask(Predictions(EXPERTS, NAMES))
    assert layer_at_reference(side.handover) == LAYERS - 1 and int(side.flights.number) == 0


def test_what_is_over_is_cut_short(device: torch.device) -> None:
    """Not begun, as the event is over: minus the tag lands, and no byte is moved."""
    side = Side(25, device, True)
    gen = torch.Generator().manual_seed(0)
    side.event(0, torch.randn(1, 5 * EXPERTS, generator=gen))
    side.ask(Predictions(EXPERTS, NAMES))
    asked = (side.pool.state == FETCHING).nonzero().flatten()
    assert len(asked) == 2
    side.flights.control.fill_(2 * 1000)
    side.copy()
    assert torch.equal(side.pool.landed_tag[asked], -side.pool.assigned_tag[asked])
    assert side.pool.counters[CUT_BYTES] == 0 and not side.slots[asked].any()
    assert not side.handover.arrived.any() and (side.handover.served == 2).all()


def test_a_copy_stands_still_while_misses_are_fetched(device: torch.device) -> None:
    """And is given up when that has no end; the part of it that was moved counts."""
    side = Side(25, device, True)
    side.event(0, torch.randn(1, 5 * EXPERTS, generator=torch.Generator().manual_seed(0)))
    side.ask(Predictions(EXPERTS, NAMES))
    asked = (side.pool.state == FETCHING).nonzero().flatten()
    if device.type == "cpu":
        pytest.skip("the interpreter has no clock that goes on")
    side.flights.control.add_(1)
    side.copy()
    assert torch.equal(side.pool.landed_tag[asked], -side.pool.assigned_tag[asked])
    assert not side.slots[asked].any()


def test_rules_of_zero_ask_for_nothing(device: torch.device) -> None:
    side = Side(25, device, True)
    side.flights.rules.zero_()
    side.event(0, torch.randn(1, 5 * EXPERTS, generator=torch.Generator().manual_seed(0)))
    side.ask(Predictions(EXPERTS, NAMES))
    side.copy()
    assert int(side.flights.number) == 0 and side.pool.counters[PREFETCHES] == 0


def test_recorded_predictions_take_the_place_of_routers(device: torch.device) -> None:
    side = Side(25, device, True)
    side.flights.rules[LEAST] = 0
    ids = torch.full((1, LAYERS, DISTANCES, NAMES), -1, dtype=torch.int32)
    ids[0, 0, 1, 0] = 5
    step = torch.zeros(1, dtype=torch.int64, device=device)
    side.event(0, torch.randn(1, 5 * EXPERTS, generator=torch.Generator().manual_seed(0)))
    side.ask(Predictions(EXPERTS, NAMES, RecordedIds(ids.to(device), step)))
    side.copy()
    slot = (side.pool.owner == 2 * EXPERTS + 5).nonzero().flatten()
    assert len(slot) == 1 and (side.slots[slot] == 2 * EXPERTS + 5).all()
    assert side.pool.landed_tag[slot] == side.pool.assigned_tag[slot]


@pytest.mark.parametrize("by_kernels", [False, True])
def test_victims_are_chosen_by_expected_use(device: torch.device, by_kernels: bool) -> None:
    where = device if by_kernels else CPU
    side = Side(8, where, by_kernels)
    numbers, exp2 = torch.ones(6, dtype=torch.int64), torch.ones(256, dtype=torch.int32)
    side.expected_use = ExpectedUse.unknown(LAYERS * EXPERTS, 8, exp2, numbers, where)
    gen = torch.Generator().manual_seed(0)
    for layer in range(2):  # six of eight slots
        side.event(layer, torch.randn(1, 5 * EXPERTS, generator=gen))
    side.expected_use.slot_passed.copy_(torch.arange(8, 0, -1))
    side.pool.state[side.pool.owner < 0] = FETCHING  # none is empty
    side.ask(Predictions(EXPERTS, NAMES))
    taken = (side.flights.slot.cpu() >= 0).sum()
    assert taken == 2 and (side.pool.state[[2, 1]] == FETCHING).all()
