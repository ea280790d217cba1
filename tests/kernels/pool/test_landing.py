"""Prefetches on the device: landing, dropping, waiting, asking; kernels against references."""

from __future__ import annotations

import threading
import time
from collections import deque

import pytest
import torch

from seqmoe_kernels import (
    Ahead,
    Asking,
    Flights,
    PoolState,
    Prefetching,
    RecordedIds,
    Request,
    Routing,
    StepForecast,
    read_request,
)
from seqmoe_kernels.eviction.expected_use import ExpectedUse
from seqmoe_kernels.pool.choose import choose, choose_reference
from seqmoe_kernels.pool.fetch import fetch, fetch_reference
from seqmoe_kernels.pool.resolve import resolve, resolve_reference
from seqmoe_kernels.prefetch.candidates import pick_candidates, pick_candidates_reference
from seqmoe_kernels.prefetch.lookahead import FEW_NAMES
from seqmoe_kernels.state import (
    CERTAIN,
    DROPPED,
    EMPTY,
    FETCHING,
    HITS,
    IN_FLIGHT,
    LANDED,
    LATE,
    LAYER_NS,
    LEAST,
    MISSES,
    MOST_KEPT,
    NAMED,
    NO_VICTIM,
    NUM_FLIGHTS,
    PATIENCE_NS,
    PER_LAYER,
    PREFETCH_HITS,
    PREFETCHES,
    READY,
    RIGHT,
)

CPU = torch.device("cpu")
COUNTED = [HITS, MISSES, NO_VICTIM, PREFETCHES, PREFETCH_HITS, LATE, DROPPED, LANDED]
LAYERS, EXPERTS, TOP_K, DISTANCES, NAMES = 6, 12, 3, 4, 4
HOST = ("requests", "control")


def make(num_slots: int, in_flight: int = 2, per_layer: int = 2) -> tuple[PoolState, Flights]:
    pool = PoolState.cold(LAYERS * EXPERTS, num_slots, CPU)
    state = Flights.none(LAYERS, TOP_K, DISTANCES, NAMES, CPU)
    state.rules[IN_FLIGHT], state.rules[PER_LAYER] = in_flight, per_layer
    state.rules[MOST_KEPT] = min(num_slots - 2 * TOP_K, NUM_FLIGHTS)
    state.rules[LAYER_NS] = 10**15
    return pool, state


def pool_on(pool: PoolState, device: torch.device) -> PoolState:
    return PoolState(*(tensor.to(device, copy=True) for tensor in pool))


def flights_on(state: Flights, device: torch.device) -> Flights:
    moved = {}
    for name, tensor in state._asdict().items():
        if name not in HOST:
            moved[name] = tensor.to(device, copy=True)
        else:
            moved[name] = tensor.pin_memory() if device.type == "cuda" else tensor.clone()
    return Flights(**moved)


def wanted(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def assert_same(
    pool: PoolState, state: Flights, expected: PoolState, expected_state: Flights
) -> None:
    if pool.clock.is_cuda:
        torch.cuda.synchronize()
    for name, tensor in expected._asdict().items():
        if name == "counters":
            assert pool.counters.cpu()[COUNTED].tolist() == tensor[COUNTED].tolist()
        elif name != "marks":
            assert torch.equal(getattr(pool, name).cpu(), tensor), name
    for name, tensor in expected_state._asdict().items():
        if name not in ("due_ns", "arrived", "agreed"):
            assert torch.equal(getattr(state, name).cpu(), tensor), name


def invariants(pool: PoolState, state: Flights) -> None:
    """Of the protocol: who is in the lookup table lies in a READY slot of its own whose tags agree,
    and nobody else is in it."""
    under_way = {s for s in state.slot.tolist() if s >= 0 and pool.state[s] == FETCHING}
    for slot, (owner, kind) in enumerate(
        zip(pool.owner.tolist(), pool.state.tolist(), strict=True)
    ):
        if kind == READY:
            assert pool.slot_of[owner] == slot
            assert pool.assigned_tag[slot] == pool.landed_tag[slot]
        else:
            assert (pool.slot_of != slot).all()
        assert (kind == FETCHING) == (slot in under_way)
        if kind == EMPTY:
            assert owner == -1


class Case:
    """The same events for references on the CPU and kernels on `device`."""

    def __init__(
        self, num_slots: int, device: torch.device, seed: int, hinted: bool = False
    ) -> None:
        self.hinted = hinted
        self.device, self.gen = device, torch.Generator().manual_seed(seed)
        self.pool, self.state = make(num_slots)
        self.state.rules[LEAST] = CERTAIN // 4
        self.state.accuracy[:, [NAMED, RIGHT]] = torch.tensor([FEW_NAMES - 9, FEW_NAMES // 4])
        self.kernel_pool = pool_on(self.pool, device)
        self.kernel_state = flights_on(self.state, device)
        self.records = torch.arange(LAYERS * EXPERTS).byte()[:, None].repeat(1, 16)
        self.slots = torch.zeros(num_slots, 16, dtype=torch.uint8)
        self.kernel_slots = self.slots.to(device, copy=True)
        self.pinned = self.records.pin_memory() if device.type == "cuda" else self.records
        self.expected_use: ExpectedUse | None = None
        self.kernel_prospects: ExpectedUse | None = None
        self.asked: deque[Request] = deque()
        self.next_number = 0

    def pick_candidates(self) -> None:
        """A forecast of three steps, of which the second one begins."""
        expected, step = torch.rand(3, LAYERS * EXPERTS, generator=self.gen), torch.tensor([4])
        expected[:, EXPERTS * LAYERS // 2 :] += 0.4  # of the layers beyond look-ahead
        pick_candidates_reference(StepForecast(expected, step), self.pool, self.state)
        moved = StepForecast(expected.to(self.device), step.to(self.device))
        pick_candidates.launch(moved, self.kernel_pool, self.kernel_state)
        assert_same(self.kernel_pool, self.kernel_state, self.pool, self.state)

    def layer(self, layer: int, recorded: torch.Tensor | None) -> None:
        routing = Routing(EXPERTS, TOP_K, True)
        seen = min(DISTANCES, LAYERS - 1 - layer)
        logits = torch.randn(1, (1 + seen) * EXPERTS, generator=self.gen)
        outcomes = []
        for device, pool, state, slots, expected_use, run, copy in (
            (
                CPU,
                self.pool,
                self.state,
                self.slots,
                self.expected_use,
                choose_reference,
                fetch_reference,
            ),
            (
                self.device,
                self.kernel_pool,
                self.kernel_state,
                self.kernel_slots,
                self.kernel_prospects,
                choose.launch,
                fetch.launch,
            ),
        ):
            own, next_ones = logits.to(device).split([EXPERTS, seen * EXPERTS], dim=1)
            chosen = run(own, layer, routing, pool, None, state, expected_use)
            ids = None
            if recorded is not None:
                step = torch.zeros(1, dtype=torch.int64, device=device)
                ids = RecordedIds(recorded.to(device), step)
            num_names = NAMES if recorded is not None else NAMES - 1  # no power of two
            asking = Asking(EXPERTS, num_names, ids, self.hinted, expected_use)
            ahead = Ahead(layer, next_ones, chosen.wanted, chosen.resolved.slots, asking)
            misses = chosen.resolved[1:]
            records = self.records if device == CPU else self.pinned
            copy(records, slots, *misses, pool.marks, Prefetching(pool, state, ahead))
            outcomes.append([t.cpu() for t in (chosen.wanted, *chosen.resolved)])
            served = chosen.resolved.slots.long()
            assert torch.equal(slots[served, 0].cpu().int(), chosen.wanted.cpu())
        assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))
        assert_same(self.kernel_pool, self.kernel_state, self.pool, self.state)
        invariants(self.pool, self.state)
        while (asked := read_request(self.state.requests, self.next_number)) is not None:
            self.asked.append(asked)
            self.next_number += 1

    def host(self) -> None:
        """The oldest request: done, refused, or not yet."""
        luck = float(torch.rand(1, generator=self.gen))
        if not self.asked or luck < 0.3:
            return
        tag, slot, expert, _ = self.asked.popleft()
        if luck < 0.9:
            self.slots[slot] = self.records[expert]
            self.kernel_slots[slot] = self.records[expert].to(self.device)
        else:
            tag = -tag
        for pool in (self.pool, self.kernel_pool):
            pool.landed_tag[slot] = tag


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "num_slots,use_recorded,hinted",
    [(9, False, False), (25, False, False), (25, True, False), (25, False, True)],
)
def test_random_steps(
    device: torch.device, num_slots: int, use_recorded: bool, hinted: bool, seed: int
) -> None:
    """Exact equality of everything, and every slot handed out holds what it should."""
    case = Case(num_slots, device, seed, hinted)
    for _ in range(3):
        if hinted:
            case.pick_candidates()
        recorded = None
        if use_recorded:
            shape = (1, LAYERS, DISTANCES, NAMES)
            scores = torch.rand(1, LAYERS, DISTANCES, EXPERTS, generator=case.gen)
            recorded = scores.argsort(-1)[..., :NAMES].int().contiguous()
            recorded[torch.rand(shape, generator=case.gen) < 0.2] = -1
        for layer in range(LAYERS):
            case.layer(layer, recorded)
            case.host()
            case.host()
    counters = case.pool.counters
    assert counters[PREFETCHES] > 3 and counters[NO_VICTIM] == 0
    assert counters[PREFETCH_HITS] + counters[DROPPED] > 0
    assert case.state.accuracy[:, NAMED].min() > 0


def ask_for(expert: int, slot: int, event: int, pool: PoolState, state: Flights) -> None:
    """What a request leaves behind."""
    if (old := int(pool.owner[slot])) >= 0:
        pool.slot_of[old] = -1
    pool.owner[slot], pool.state[slot] = expert, FETCHING
    pool.assigned_tag[slot] += 1
    free = state.slot.tolist().index(-1)
    state.slot[free], state.event[free] = slot, event


RUNS = pytest.mark.parametrize("run", [resolve_reference, resolve.launch])


@RUNS
def test_only_the_tag_assigned_last_lands(run: object, device: torch.device) -> None:
    """An older copy of the same slot, or none: the expert is a miss, the copy is dropped."""
    pool, state = make(9)
    ask_for(7, 2, 5, pool, state)
    pool.assigned_tag[2] = 4
    pool.landed_tag[2] = 3
    pool, state = pool_on(pool, device), flights_on(state, device)
    assert callable(run)
    resolved = run(wanted(7).to(device), pool, state)
    assert resolved.num_misses.tolist() == [1] and resolved.slots.tolist() == [0]
    assert pool.counters[DROPPED] == 1 and pool.owner[2] == -1 and pool.state[2] == FETCHING
    pool.landed_tag[2] = 4  # it lands after all
    run(wanted(8).to(device), pool, state)
    assert pool.state[2] == EMPTY and pool.slot_of[7] == 0 and state.slot.max() == -1


@RUNS
def test_a_copy_in_time_is_a_hit_and_kept_for_its_event(run: object, device: torch.device) -> None:
    pool, state = make(3)
    ask_for(7, 1, 3, pool, state)
    pool.landed_tag[1] = 1
    pool, state = pool_on(pool, device), flights_on(state, device)
    assert callable(run)
    run(wanted(1, 2).to(device), pool, state)
    assert pool.state[1] == READY and pool.score[1] == 0
    run(wanted(3, 4).to(device), pool, state)
    assert pool.slot_of[7] == 1 and pool.counters[PREFETCH_HITS] == 0  # the oldest, but promised
    hit = run(wanted(7).to(device), pool, state)
    assert hit.num_misses.tolist() == [0] and hit.slots.tolist() == [1]
    assert pool.counters[[HITS, PREFETCH_HITS]].tolist() == [1, 1]
    assert state.slot.max() == -1 and state.absent[0] == 1


@RUNS
def test_a_wrong_prefetch_is_the_next_victim(run: object, device: torch.device) -> None:
    pool, state = make(3)
    ask_for(7, 1, 1, pool, state)
    pool.landed_tag[1] = 1
    pool, state = pool_on(pool, device), flights_on(state, device)
    assert callable(run)
    run(wanted(1, 2).to(device), pool, state)
    assert run(wanted(3).to(device), pool, state).slots.tolist() == [1]


@RUNS
def test_a_refused_copy_leaves_an_empty_slot(run: object, device: torch.device) -> None:
    pool, state = make(9)
    ask_for(7, 1, 5, pool, state)
    pool.landed_tag[1] = -1
    pool, state = pool_on(pool, device), flights_on(state, device)
    assert callable(run)
    assert run(wanted(7).to(device), pool, state).num_misses.tolist() == [1]
    assert pool.counters[[LANDED, DROPPED, MISSES]].tolist() == [0, 0, 1] and pool.state[1] == EMPTY


@pytest.mark.parametrize("patience_s", [0.0, 20.0])
def test_a_copy_about_to_land_is_waited_for(patience_s: float) -> None:
    pool, state = make(9)
    state.rules[PATIENCE_NS] = int(patience_s * 1e9)
    ask_for(7, 1, 1, pool, state)
    state.due_ns[0] = time.perf_counter_ns()

    def land() -> None:
        time.sleep(0.05)
        pool.landed_tag[1] = 1

    thread = threading.Thread(target=land)
    thread.start()
    resolved = resolve(wanted(7), pool, state)
    thread.join()
    waited = patience_s > 0
    assert resolved.num_misses.tolist() == [not waited]
    assert pool.counters[[LATE, DROPPED, MISSES, HITS]].tolist() == [waited, not waited, 1, 0]


def test_waiting_ends(device: torch.device) -> None:
    pool, state = make(9)
    state.rules[PATIENCE_NS] = 1000
    ask_for(7, 1, 1, pool, state)
    state.due_ns[0] = -(2**62)
    pool, state = pool_on(pool, device), flights_on(state, device)
    resolved = resolve.launch(wanted(7).to(device), pool, state)
    assert resolved.num_misses.tolist() == [1] and pool.counters[DROPPED] == 1
