"""The two structures that kernels receive beside tensors and ints."""

from __future__ import annotations

from typing import NamedTuple

import torch

EMPTY, FETCHING, READY = 0, 1, 2  # values of PoolState.state

# Indices into PoolState.counters. HITS to NO_VICTIM count lookups. Times are sums in nanoseconds of
# the device's clock: waiting for misses, steps from end to end, and the gaps between steps.
# FAULT is 0 until `verify_slots` sees a slot that does not hold the expert wanted; then, and for
# good, it is that first fault in the 47 bits that a ring carries:
#   bits 0-15 flat id wanted + 1, bits 16-30 slot, bits 31-46 flat id found + 1 (0: no id)
HITS, MISSES, NO_VICTIM, FAULT, STALL_NS, STEP_NS, GAP_NS = range(7)
NUM_COUNTERS = 7
# Indices into PoolState.marks: moments in nanoseconds, 0 if there was none.
STEP_BEGAN, STEP_ENDED, STALL_BEGAN, STALL_ENDED = range(4)
NUM_MARKS = 4
# Indices into PoolState.rule. With a tick of 0 a use scores the clock (LRU). Else scores are
# logarithms of counts that decay: a use adds 2^now to 2^score, and every step adds the tick to now.
RULE_TICK, RULE_NOW = 0, 1


class ExpertFormat(NamedTuple):
    """Byte offsets of the parts of one expert record: gate [I, H], up [I, H], down [H, I].

    Scales are F32, one per 128x128 block, at the offsets `*_scale`; -1 when the weights are not
    `torch.float8_e4m3fn`. `stamp` is the offset of the record's I64 flat expert id.
    """

    weight_dtype: torch.dtype
    hidden: int
    inter: int
    gate: int
    up: int
    down: int
    gate_scale: int
    up_scale: int
    down_scale: int
    stamp: int
    record_bytes: int


class PoolState(NamedTuple):
    """The bookkeeping of the pool, all tensors on one device. S slots, N = layers * experts.

    A flat expert id is `layer * num_experts + expert`. Only READY slots are in `slot_of`.
    """

    slot_of: torch.Tensor  # int32 [N], slot or -1: the lookup table
    owner: torch.Tensor  # int32 [S], flat expert id or -1
    state: torch.Tensor  # int32 [S], EMPTY, FETCHING or READY
    assigned_tag: torch.Tensor  # int64 [S], counted up at each assignment
    landed_tag: torch.Tensor  # int64 [S], tag of the last record that landed
    score: torch.Tensor  # int64 [S], that of the owner; the victim is the smallest
    usage: torch.Tensor  # int64 [N], the score that each expert got with its last use
    rule: torch.Tensor  # int64 [2], RULE_TICK and RULE_NOW: how a use becomes a score
    log_sums: torch.Tensor  # int32 [G], log2(1 + 2^-gap) in score units, for gaps in steps of 256
    clock: torch.Tensor  # int64 [1], counts resolve events
    counters: torch.Tensor  # int64 [7], HITS to GAP_NS
    marks: torch.Tensor  # int64 [4], STEP_BEGAN to STALL_ENDED

    @classmethod
    def cold(cls, num_experts: int, num_slots: int, device: torch.device) -> PoolState:
        """The state of a pool that nothing has happened to: every slot EMPTY, LRU."""

        def filled(size: int, value: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        return cls(
            slot_of=filled(num_experts, -1, torch.int32),
            owner=filled(num_slots, -1, torch.int32),
            state=filled(num_slots, EMPTY, torch.int32),
            assigned_tag=filled(num_slots, 0),
            landed_tag=filled(num_slots, 0),
            score=filled(num_slots, -1),
            usage=filled(num_experts, 0),
            rule=filled(2, 0),
            log_sums=filled(1, 0, torch.int32),
            clock=filled(1, 0),
            counters=filled(NUM_COUNTERS, 0),
            marks=filled(NUM_MARKS, 0),
        )
