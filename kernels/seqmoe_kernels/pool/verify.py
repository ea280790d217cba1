"""Proof that slots hold what the lookup table says: the stamp of every record that will be read."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.state import FAULT, NUM_COUNTERS

MAX_VERIFIED_EXPERTS = 65535  # flat ids that a fault can name
_SLOT_SHIFT, _FOUND_SHIFT = 16, 31

_FAULT, _MAX_EXPERTS = map(tl.constexpr, (FAULT, MAX_VERIFIED_EXPERTS))
_SLOT, _FOUND = map(tl.constexpr, (_SLOT_SHIFT, _FOUND_SHIFT))


class Fault(NamedTuple):
    """A slot did not hold the expert `wanted` but `found`: flat ids, None for no id at all."""

    wanted: int
    slot: int
    found: int | None

    def encode(self) -> int:
        """The value of counters[FAULT]; see `state`."""
        found = 0 if self.found is None else self.found + 1
        return found << _FOUND_SHIFT | self.slot << _SLOT_SHIFT | self.wanted + 1

    @classmethod
    def decode(cls, value: int) -> Fault:
        """From a value that is not 0."""
        found = value >> _FOUND_SHIFT
        slot = (value >> _SLOT_SHIFT) % (1 << _FOUND_SHIFT - _SLOT_SHIFT)
        return cls(value % (1 << _SLOT_SHIFT) - 1, slot, found - 1 if found else None)


def verify_slots_reference(
    wanted: torch.Tensor,
    slots: torch.Tensor,
    pool_slots: torch.Tensor,
    stamp_offset: int,
    counters: torch.Tensor,
) -> None:
    for expert, slot in zip(wanted.tolist(), slots.tolist(), strict=True):
        if slot < 0:
            continue
        found = int(pool_slots[slot, stamp_offset : stamp_offset + 8].view(torch.int64))
        if found != expert and not counters[FAULT]:
            known = found if 0 <= found < MAX_VERIFIED_EXPERTS else None
            counters[FAULT] = Fault(expert, slot, known).encode()


@triton.jit
def _verify_kernel(wanted, slots, stamps, counters, n, row_words, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    expert = tl.load(wanted + i, mask=i < n, other=0).to(tl.int64)
    slot = tl.load(slots + i, mask=i < n, other=-1).to(tl.int64)
    found = tl.load(stamps + slot * row_words, mask=slot >= 0, other=0)
    before = tl.load(counters + _FAULT)
    wrong = (slot >= 0) & (found != expert)
    known = tl.where((found >= 0) & (found < _MAX_EXPERTS), found + 1, 0)
    fault = (known << _FOUND) | (slot << _SLOT) | (expert + 1)
    first = tl.min(tl.where(wrong, i, BLOCK), 0)
    fault = tl.sum(tl.where(i == first, fault, 0), 0)
    tl.debug_barrier()  # all threads have read what one of them writes now
    tl.store(counters + _FAULT, tl.where(before == 0, fault, before))


@verb(verify_slots_reference)
def verify_slots(
    wanted: torch.Tensor,
    slots: torch.Tensor,
    pool_slots: torch.Tensor,
    stamp_offset: int,
    counters: torch.Tensor,
) -> None:
    """Check that slot `slots[i]` holds the expert `wanted[i]`, both int32 [n]; -1 is not read.

    `pool_slots` uint8 [S, record_bytes] has the I64 flat id of what each slot holds at
    `stamp_offset`. The first fault ever is kept in counters[FAULT] (i64 [16]), encoded as described
    in `state`; `Fault.decode` reads it. Flat ids below `MAX_VERIFIED_EXPERTS`.
    """
    n = wanted.shape[0]
    check("wanted", wanted, torch.int32, (n,), wanted.device)
    check("slots", slots, torch.int32, (n,), wanted.device)
    check("pool_slots", pool_slots, torch.uint8, (-1, -1), wanted.device)
    check("counters", counters, torch.int64, (NUM_COUNTERS,), wanted.device)
    record_bytes = pool_slots.shape[1]
    if record_bytes % 8 or stamp_offset % 8 or not 0 <= stamp_offset < record_bytes:
        raise ValueError(
            f"a stamp at byte {stamp_offset} of records of {record_bytes} bytes, expected "
            "multiples of 8"
        )
    if n > 0:
        _verify_kernel[(1,)](
            wanted,
            slots,
            pool_slots.view(torch.int64)[:, stamp_offset // 8 :],
            counters,
            n,
            record_bytes // 8,
            triton.next_power_of_2(n),
            num_warps=1,
            enable_fp_fusion=True,
        )
