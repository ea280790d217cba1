"""ExpertPool against a plain model of a least-recently-used pool."""

from __future__ import annotations

from collections import OrderedDict

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmoe_cli.residency.pool import ExpertPool
from seqmoe_kernels.state import FETCHING

CPU = torch.device("cpu")
NUM_EXPERTS, RECORD_BYTES = 12, 256
RECORDS = torch.arange(NUM_EXPERTS, dtype=torch.uint8).unsqueeze(1).repeat(1, RECORD_BYTES)

events = st.lists(
    st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=1, max_size=4, unique=True), max_size=40
)


@settings(deadline=None, max_examples=60)
@given(events, st.integers(4, NUM_EXPERTS))
def test_behaves_like_an_lru_of_events(events: list[list[int]], num_slots: int) -> None:
    """Same hits and misses as a list in order of last use; experts of one event that were used at
    the same time leave in the order of their slots, so ties are compared as a set."""
    pool = ExpertPool(num_slots, RECORDS, CPU)
    last_use: OrderedDict[int, int] = OrderedDict()
    hits = misses = 0
    for now, wanted in enumerate(events):
        slots = pool.require(torch.tensor(wanted, dtype=torch.int32)).tolist()
        resident = set(pool.state.owner.tolist()) - {-1}
        for expert in wanted:
            hits += expert in last_use
            misses += expert not in last_use
        gone = set(last_use) - resident
        stayed = set(last_use) & resident - set(wanted)
        assert not gone & set(wanted)
        assert all(last_use[g] <= last_use[s] for g in gone for s in stayed)
        for expert in gone:
            del last_use[expert]
        for expert in wanted:
            last_use[expert] = now
        assert resident == set(last_use)
        assert len(resident) <= num_slots
        assert len(set(slots)) == len(wanted)
        assert [int(pool.slots[slot, 0]) for slot in slots] == wanted  # the right bytes
    assert pool.counters()[:2] == [hits, misses]


def test_tags_count_assignments_and_outlive_a_reset() -> None:
    pool = ExpertPool(2, RECORDS, CPU)
    for expert in (0, 1, 2, 0):
        pool.require(torch.tensor([expert], dtype=torch.int32))
    assert pool.state.assigned_tag.tolist() == pool.state.landed_tag.tolist()
    assert sum(pool.state.assigned_tag.tolist()) == 4
    pool.reset()
    assert not pool.is_resident(torch.arange(NUM_EXPERTS)).any()
    pool.require(torch.tensor([5], dtype=torch.int32))
    assert sum(pool.state.assigned_tag.tolist()) == 5


def test_a_slot_that_is_being_filled_is_no_victim() -> None:
    pool = ExpertPool(3, RECORDS, CPU)
    pool.require(torch.tensor([0, 1, 2], dtype=torch.int32))
    slot = int(pool.state.slot_of[1])
    pool.state.state[slot] = FETCHING
    pool.state.slot_of[1] = -1
    for expert in (4, 5, 6, 7):
        pool.require(torch.tensor([expert], dtype=torch.int32))
    assert pool.state.owner[slot] == 1
    assert pool.slots[slot, 0] == 1


def test_a_ranking_fills_the_pool_and_its_first_leave_last() -> None:
    pool = ExpertPool(4, RECORDS, CPU)
    pool.fill(torch.tensor([7, 3, 9, 1, 5], dtype=torch.int32))
    for expert, gone in ((0, 1), (2, 9), (4, 3)):
        assert pool.is_resident(torch.tensor([gone])).all()
        pool.require(torch.tensor([expert], dtype=torch.int32))
        # one event has filled it: equals leave in the order of their slots
        assert not pool.is_resident(torch.tensor([gone])).any()
    assert pool.is_resident(torch.tensor([7])).all()


def test_demoted_experts_are_the_next_victims() -> None:
    pool = ExpertPool(3, RECORDS, CPU)
    for expert in (0, 1, 2):
        pool.require(torch.tensor([expert], dtype=torch.int32))
    pool.demote(torch.tensor([2, 8]))
    pool.require(torch.tensor([5], dtype=torch.int32))
    assert pool.is_resident(torch.tensor([0, 1, 2, 5])).tolist() == [True, True, False, True]
