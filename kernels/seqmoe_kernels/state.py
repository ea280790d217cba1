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
# Prefetches asked for; those that were wanted and there in time, which are hits; wanted and waited
# for, which are misses without a fetch; wanted but too late, so that they were fetched and the copy
# was dropped; and all copies that have landed, which those are not that the host refused because
# their time was over.
PREFETCHES, PREFETCH_HITS, LATE, DROPPED, LANDED = range(7, 12)
# Bytes of copies that were cut short, their time being over.
CUT_BYTES = 12
# Experts that the steps lacked whose victims were chosen by a forecast (misses, or prefetch hits),
# and how many it would have been by decayed counts.
MISSED_BY_FORECAST, MISSED_BY_COUNTS = range(13, 15)
# Steps whose end the schedule kernel did not see.
GAVE_UP = 15
NUM_COUNTERS = 16
# Indices into PoolState.marks: moments in nanoseconds, 0 if there was none.
STEP_BEGAN, STEP_ENDED, STALL_BEGAN, STALL_ENDED = range(4)
NUM_MARKS = 4
# Indices into PoolState.rule. With a tick of 0 a use scores the clock (LRU). Else scores are
# logarithms of counts that decay: a use adds 2^now to 2^score, and every step adds the tick to now.
RULE_TICK, RULE_NOW = 0, 1
# Indices into Flights.rules. How many copies may be under way (0: none is asked for), asked for in
# one layer, and have slots kept for them; the time of a layer, of a copy, and until one starts; how
# much after it is wanted a copy may land to be worth it, and how long one is waited for; and how
# probable a use must be to be copied for, in units of 1/CERTAIN.
IN_FLIGHT, PER_LAYER, MOST_KEPT, LAYER_NS, COPY_NS, DELAY_NS, SLACK_NS, PATIENCE_NS = range(8)
LEAST = 8
NUM_RULES = 9
CERTAIN = 1 << 16
NUM_FLIGHTS = 32  # a power of two
NUM_REQUESTS = 64  # entries of the ring; far more than copies that may be under way
REQUEST_WORDS = 3
MISSING, PREDICTED, RIGHT = range(3)  # columns of Flights.accuracy


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
    counters: torch.Tensor  # int64 [16], HITS to GAVE_UP
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


class Flights(NamedTuple):
    """Prefetches from the request to the event for which they were made. F = `NUM_FLIGHTS`, D
    layers of look-ahead, L layers, n predictions for each (rounded up to a power of two), K wanted.

    A flight whose slot is FETCHING is under way; its expert is in no lookup table, but the owner of
    the slot, unless the copy was dropped. A flight whose slot is READY has landed, and the slot is
    no victim until its event has passed. `requests` and `control` are for what copies: `beside`, a
    kernel on the device; else a thread, in host memory (pinned when the rest is on a GPU), which
    the device only writes. `control` is clock << 1, plus 1 while misses are being fetched.
    """

    slot: torch.Tensor  # int32 [F], -1 for none
    event: torch.Tensor  # int64 [F], the clock of the event that it is for
    due_ns: torch.Tensor  # int64 [F], when it should land
    rules: torch.Tensor  # int64 [9], IN_FLIGHT to LEAST
    number: torch.Tensor  # int64 [1], of the next request
    arrived: torch.Tensor  # int32 [1], programs of a fetch that are done
    agreed: torch.Tensor  # int64 [F + 1], what the threads of a kernel agree on: tags, the time
    absent: torch.Tensor  # int32 [K], 1: a miss if there were no prefetch; of the last event
    candidates: torch.Tensor  # int32 [D * n], absent, likely in this step, ascending, then -1
    predicted: torch.Tensor  # int32 [L, D, n], absent experts predicted for a layer, 1 to D ahead
    accuracy: torch.Tensor  # int64 [D, 3], experts MISSING, PREDICTED and RIGHT
    requests: torch.Tensor  # int64 [NUM_REQUESTS, 3]
    control: torch.Tensor  # int64 [1]

    @classmethod
    def none(
        cls,
        num_layers: int,
        top_k: int,
        distances: int,
        num_predicted: int,
        device: torch.device,
        beside: bool = False,
    ) -> Flights:
        """Nothing is under way; all rules are 0. `num_predicted` is a power of two."""

        def filled(*shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        def for_copies(*shape: int) -> torch.Tensor:
            if beside:
                return filled(*shape, value=-1)
            pin = device.type == "cuda"
            return torch.full(shape, -1, dtype=torch.int64, pin_memory=pin)

        return cls(
            slot=filled(NUM_FLIGHTS, value=-1, dtype=torch.int32),
            event=filled(NUM_FLIGHTS),
            due_ns=filled(NUM_FLIGHTS),
            rules=filled(NUM_RULES),
            number=filled(1),
            arrived=filled(1, dtype=torch.int32),
            agreed=filled(NUM_FLIGHTS + 1),
            absent=filled(top_k, dtype=torch.int32),
            candidates=filled(distances * num_predicted, value=-1, dtype=torch.int32),
            predicted=filled(num_layers, distances, num_predicted, value=-1, dtype=torch.int32),
            accuracy=filled(distances, 3),
            requests=for_copies(NUM_REQUESTS, REQUEST_WORDS),
            control=for_copies(1).zero_(),
        )
