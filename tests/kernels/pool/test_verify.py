"""verify_slots: silent while every slot holds what is wanted, and the first fault is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from seqmoe_kernels import Fault
from seqmoe_kernels.pool.resolve import MAX_SLOTS
from seqmoe_kernels.pool.step_ring import VALUE_BITS
from seqmoe_kernels.pool.verify import MAX_VERIFIED_EXPERTS, verify_slots
from seqmoe_kernels.state import FAULT, NUM_COUNTERS

NUM_SLOTS, RECORD_BYTES, STAMP = 300, 512, 256
CPU = torch.device("cpu")


def pool_of(owners: list[int]) -> torch.Tensor:
    """Slots whose stamps are `owners`; all other bytes are as unlike an id as can be."""
    slots = torch.full((len(owners), RECORD_BYTES), 255, dtype=torch.uint8)
    slots.view(torch.int64)[:, STAMP // 8] = torch.tensor(owners)
    return slots


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def verified(
    device: torch.device,
    wanted: list[int],
    slots: list[int],
    pool_slots: torch.Tensor,
    counters: torch.Tensor | None = None,
) -> list[int]:
    """The counters after the reference, which those after the kernel must equal."""
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64) if counters is None else counters
    on_device = counters.to(device, copy=True)
    verify_slots.launch(
        ints(wanted).to(device), ints(slots).to(device), pool_slots.to(device), STAMP, on_device
    )
    expected = counters.clone()
    verify_slots(ints(wanted), ints(slots), pool_slots, STAMP, expected)
    assert on_device.tolist() == expected.tolist()
    return expected.tolist()


@pytest.mark.parametrize("n", [1, 2, 7, 8, 100, 256])
def test_the_first_of_the_faults(device: torch.device, n: int) -> None:
    gen = torch.Generator().manual_seed(n)
    owners = torch.randperm(MAX_VERIFIED_EXPERTS, generator=gen)[:NUM_SLOTS].tolist()
    slots = torch.randperm(NUM_SLOTS, generator=gen)[:n].tolist()
    wanted = [owners[slot] for slot in slots]
    assert not any(verified(device, wanted, slots, pool_of(owners)))
    for wrong in {0, n // 2, n - 1}:
        other = list(wanted)
        for i in range(wrong, n):  # this one and all behind it
            other[i] = (other[i] + 1) % MAX_VERIFIED_EXPERTS
        counters = verified(device, other, slots, pool_of(owners))
        fault = Fault.decode(counters[FAULT])
        assert fault == (other[wrong], slots[wrong], wanted[wrong])
        assert [c for i, c in enumerate(counters) if i != FAULT] == [0] * (NUM_COUNTERS - 1)


def test_a_fault_stays(device: torch.device) -> None:
    counters = torch.arange(1, NUM_COUNTERS + 1)
    counters[FAULT] = Fault(4, 1, None).encode()
    assert verified(device, [5], [0], pool_of([6, 7]), counters) == counters.tolist()
    assert verified(device, [6], [0], pool_of([6, 7]), counters) == counters.tolist()


@pytest.mark.parametrize("stamp", [-1, MAX_VERIFIED_EXPERTS, -(2**63), 2**63 - 1, 2**32 + 3])
def test_what_is_no_id_is_no_id(device: torch.device, stamp: int) -> None:
    counters = verified(device, [3], [1], pool_of([3, stamp]))
    assert Fault.decode(counters[FAULT]) == (3, 1, None)


def test_a_slot_that_there_is_not_is_not_read(device: torch.device) -> None:
    assert not any(verified(device, [3, 4], [-1, 0], pool_of([4])))


def test_every_fault_fits_a_word_of_the_ring() -> None:
    last = MAX_VERIFIED_EXPERTS - 1
    codes = set()
    for fault in (
        Fault(0, 0, None),
        Fault(0, 0, 0),
        Fault(last, MAX_SLOTS - 1, last),
        Fault(last, MAX_SLOTS - 1, None),
        Fault(last, 0, 0),
        Fault(0, MAX_SLOTS - 1, last),
    ):
        code = fault.encode()
        assert 0 < code < 1 << VALUE_BITS
        assert Fault.decode(code) == fault
        codes.add(code)
    assert len(codes) == 6


def refusals() -> list[tuple[str, Callable[[], object]]]:
    pool, counters = pool_of([0, 1]), torch.zeros(NUM_COUNTERS, dtype=torch.int64)
    one = ints([0])
    return [
        ("torch.int64", lambda: verify_slots.launch(one.long(), one, pool, STAMP, counters)),
        ("[2]", lambda: verify_slots.launch(one, ints([0, 1]), pool, STAMP, counters)),
        ("260", lambda: verify_slots.launch(one, one, pool, 260, counters)),
        ("512", lambda: verify_slots.launch(one, one, pool, 512, counters)),
        ("[3]", lambda: verify_slots.launch(one, one, pool, STAMP, counters[:3])),
    ]


@pytest.mark.parametrize("number", range(len(refusals())))
def test_refusals(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)  # checks only: nothing launches
    value, call = refusals()[number]
    with pytest.raises(ValueError) as caught:
        call()
    assert value in str(caught.value)
