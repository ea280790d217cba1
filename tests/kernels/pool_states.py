"""Small pools and prefetches under way for the tests of kernels, on the CPU and moved elsewhere."""

from __future__ import annotations

import torch

from seqmoe_kernels import Flights, PoolState
from seqmoe_kernels.state import (
    DROPPED,
    EMPTY,
    FETCHING,
    HITS,
    IN_FLIGHT,
    LANDED,
    LATE,
    LAYER_NS,
    MISSES,
    MOST_KEPT,
    NO_VICTIM,
    NUM_FLIGHTS,
    PER_LAYER,
    PREFETCH_HITS,
    PREFETCHES,
    READY,
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
    """Of the protocol: an expert in the lookup table lies in a READY slot of its own, whose tags
    agree; no other expert is in the table."""
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
