"""The schedule: which prefetches are asked for behind a layer, one kernel beside those of the step.

Look-ahead predicts experts for the next layers. Those that are absent and can land in time are
asked for, if enough of the predictions so many layers ahead have been right: the earliest event
first, within it the likeliest. Behind them come the candidates, which a forecast expected in later
layers when the step began. A kernel (`copy_prefetches`) or a thread of the host copies them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check
from seqmoe_kernels.common.clock import now_ns
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.eviction.expected_use import ExpectedUse, check_expected_use
from seqmoe_kernels.eviction.victims import victim_scores
from seqmoe_kernels.pool import lock
from seqmoe_kernels.pool.landing import agreed_now, check_flights
from seqmoe_kernels.pool.lock import (
    FREE,
    HELD,
    Handover,
    check_handover,
    layer_at,
    layer_at_reference,
    leave_lock,
    try_lock,
)
from seqmoe_kernels.pool.resolve import check_pool
from seqmoe_kernels.prefetch.jobs import NO_JOB, start_jobs, start_jobs_reference
from seqmoe_kernels.prefetch.lookahead import (
    Predictions,
    count_right,
    count_right_reference,
    precise_enough,
    precise_enough_reference,
    predicted_experts,
    predicted_reference,
)
from seqmoe_kernels.state import (
    COPY_NS,
    DELAY_NS,
    EMPTY,
    FETCHING,
    GAVE_UP,
    IN_FLIGHT,
    LAYER_NS,
    MOST_KEPT,
    NUM_FLIGHTS,
    PER_LAYER,
    PREFETCHES,
    SLACK_NS,
    Flights,
    PoolState,
)

LOOKS = 2 if triton.knobs.runtime.interpret else 1 << 24  # in the interpreter nothing will happen

_LOOKS, _NO_JOB = tl.constexpr(LOOKS), tl.constexpr(NO_JOB)
_EMPTY, _FETCHING, _FREE = map(tl.constexpr, (EMPTY, FETCHING, FREE))
_IN_FLIGHT, _PER_LAYER, _MOST_KEPT = map(tl.constexpr, (IN_FLIGHT, PER_LAYER, MOST_KEPT))
_LAYER_NS, _COPY_NS, _DELAY_NS = map(tl.constexpr, (LAYER_NS, COPY_NS, DELAY_NS))
_SLACK_NS, _PREFETCHES = map(tl.constexpr, (SLACK_NS, PREFETCHES))
_NUM_FLIGHTS, _GAVE_UP = map(tl.constexpr, (NUM_FLIGHTS, GAVE_UP))


def schedule_reference(
    predictions: Predictions,
    pool: PoolState,
    flights: Flights,
    handover: Handover,
    expected_use: ExpectedUse | None = None,
) -> None:
    layer, top_k = layer_at_reference(handover), len(handover.slots)
    if not int(handover.lock) & FREE or layer == len(flights.predicted) - 1:
        return
    if flights.rules[IN_FLIGHT]:
        jobs, resident = _jobs_reference(predictions, layer, pool, flights, handover)
        first_to_come = (layer + 1) * predictions.num_experts
        barred = [*handover.slots[handover.slots >= 0].tolist(), *resident]
        start_jobs_reference(jobs, barred, first_to_come, pool, flights, expected_use)
        wanted = handover.used[layer * top_k :][:top_k]
        count_right_reference(layer, wanted, flights)
    handover.lock.bitwise_and_(~(FREE | HELD))


def _jobs_reference(
    predictions: Predictions, layer: int, pool: PoolState, flights: Flights, handover: Handover
) -> tuple[list[tuple[int, int]], list[int]]:
    """What may be copied, (layers ahead, flat id) by urgency, and slots of what is there."""
    coming = {int(pool.owner[slot]) for slot in flights.slot.tolist() if slot >= 0}
    enough = precise_enough_reference(flights)
    jobs, resident = [], []
    rows = predicted_reference(predictions, layer, handover.logits, flights)
    for distance, experts in enumerate(rows, 1):
        row = flights.predicted[layer + distance, distance - 1].fill_(-1)
        for rank, expert in enumerate(experts):
            if expert < 0:
                continue
            slot = int(pool.slot_of[expert])
            if slot >= 0:
                resident.append(slot)
            elif expert not in coming and enough[distance - 1]:
                jobs.append((distance, expert))
            if slot < 0 or expert in coming:
                row[rank] = expert
    for expert in flights.candidates.tolist() if predictions.use_candidates else ():
        distance, slot = expert // predictions.num_experts - layer, int(pool.slot_of[expert])
        if expert >= 0 and distance > 0 and slot >= 0:
            resident.append(slot)
        elif expert >= 0 and distance > flights.predicted.shape[1] and expert not in coming:
            jobs.append((distance, expert))
    return jobs, resident


@triton.jit
def _both(first, second):
    return tl.reshape(tl.join(first, second), (2 * first.shape[0],))


@triton.jit
def _schedule(
    layer, pool, flights, handover, expected_use, recorded, num_recorded, num_slots,
    E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, NUM_LAYERS: tl.constexpr,
    DISTANCES: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, CANDIDATES: tl.constexpr, ON_HOST: tl.constexpr,
):  # fmt: skip
    """Ask for prefetches behind `layer`. Touches no slot that this layer uses, so that the kernels
    behind it may read those at once."""
    # A copy waits for this: what can be known at once is loaded before anything is decided.
    f, k = tl.arange(0, _NUM_FLIGHTS), tl.arange(0, BLOCK_K)
    slot, last_due = tl.load(flights.slot + f), tl.load(flights.due_ns + f)
    in_flight, per_layer = tl.load(flights.rules + _IN_FLIGHT), tl.load(flights.rules + _PER_LAYER)
    most_kept = tl.load(flights.rules + _MOST_KEPT)
    used = tl.load(handover.slots + k, mask=k < K, other=-1)
    enough = precise_enough(flights, DISTANCES)
    layer_ns, copy_ns = tl.load(flights.rules + _LAYER_NS), tl.load(flights.rules + _COPY_NS)
    slack_ns, delay_ns = tl.load(flights.rules + _SLACK_NS), tl.load(flights.rules + _DELAY_NS)
    clock, number = tl.load(pool.clock), tl.load(flights.number)
    count = tl.load(pool.counters + _PREFETCHES)
    owner = tl.load(pool.owner + slot, mask=slot >= 0, other=-2)
    state = tl.load(pool.state + slot, mask=slot >= 0, other=_EMPTY)
    if in_flight > 0:
        now = agreed_now(flights)
        under_way = state == _FETCHING
        taken = tl.sum((slot >= 0).to(tl.int64) + (under_way.to(tl.int64) << 8), 0)
        room = tl.minimum(in_flight - (taken >> 8), per_layer)
        room = tl.minimum(room, most_kept - (taken & 0xFF))
        places = tl.arange(0, BLOCK_S)
        in_question = tl.where(room > 0, num_slots, 0)
        victims = victim_scores(pool, expected_use, (layer + 1) * E, in_question, places)
        seen = tl.minimum(NUM_LAYERS - 1 - layer, DISTANCES)
        expert = predicted_experts(
            handover.logits, recorded, num_recorded, layer, seen, E, N, NUM_LAYERS, DISTANCES,
            BLOCK_E, BLOCK_N,
        )  # fmt: skip
        found = tl.load(pool.slot_of + expert, mask=expert >= 0, other=-1)
        coming = tl.max((expert[:, None] == owner[None, :]).to(tl.int32), 1) > 0
        absent = (expert >= 0) & (found < 0)
        i = tl.arange(0, DISTANCES * BLOCK_N)
        d, rank = i // BLOCK_N, i % BLOCK_N
        kept = tl.where(absent | ((expert >= 0) & coming), expert, -1)
        row = flights.predicted + ((layer + 1 + d) * DISTANCES + d) * BLOCK_N
        tl.store(row + rank, kept, mask=d < seen)
        asked = tl.broadcast_to(enough[:, None], (DISTANCES, BLOCK_N))
        asked = tl.reshape(asked, (DISTANCES * BLOCK_N,)) & absent & (coming == 0)
        job = tl.where(asked, i, _NO_JOB)
        if CANDIDATES:
            other = tl.load(flights.candidates + i)
            later = other // E - layer - 1
            known = tl.load(pool.slot_of + other, mask=(other >= 0) & (later >= 0), other=-1)
            coming = tl.max((other[:, None] == owner[None, :]).to(tl.int32), 1) > 0
            absent = (other >= 0) & (later >= DISTANCES) & (known < 0) & (coming == 0)
            job = _both(job, tl.where(absent, DISTANCES * BLOCK_N + i, _NO_JOB))
            expert, found, d = _both(expert, other), _both(found, known), _both(d, later)
        if (room > 0) & (tl.min(job, 0) < _NO_JOB):
            due = tl.maximum(now + delay_ns, tl.max(tl.where(under_way, last_due, 0), 0))
            latest = now + slack_ns + (d + 1) * layer_ns
            start_jobs(
                job, expert, found, d, latest, room, slot, due, copy_ns, clock, number, count, used,
                victims, places, pool, flights, expected_use, ON_HOST,
            )  # fmt: skip
        count_right(handover.used + layer * K, flights, layer, K, BLOCK_K, DISTANCES, BLOCK_N)


@triton.jit
def _schedule_kernel(
    pool,
    flights,
    handover,
    expected_use,
    recorded,
    num_recorded,
    num_slots,
    limit_ns,
    E: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    DISTANCES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
    ON_HOST: tl.constexpr,
):
    """One program. All tensors are those of the structures, whose docstrings have the shapes;
    expected_use and recorded (`RecordedIds` of int32 [num_recorded, L, D, N]) may be None."""
    until = now_ns() + limit_ns
    looks, gave_up = tl.full((), _LOOKS, tl.int32), tl.full((), 1, tl.int64)
    while looks > 0:
        word = tl.atomic_or(handover.lock, 0, sem="acquire")
        layer = layer_at(word)
        if layer == NUM_LAYERS - 1:
            looks, gave_up = looks * 0, gave_up * 0
        else:
            if (word & _FREE) != 0:  # noqa: SIM102 (one condition is the compiler's)
                if try_lock(handover.lock, word):
                    _schedule(
                        layer, pool, flights, handover, expected_use, recorded, num_recorded,
                        num_slots, E, K, N, NUM_LAYERS, DISTANCES, BLOCK_E, BLOCK_K, BLOCK_N,
                        BLOCK_S, CANDIDATES, ON_HOST,
                    )  # fmt: skip
                    leave_lock(handover.lock)
            looks = tl.where(now_ns() < until, looks - 1, 0)
    tl.atomic_add(pool.counters + _GAVE_UP, gave_up)


@verb(schedule_reference)
def schedule_prefetches(
    predictions: Predictions,
    pool: PoolState,
    flights: Flights,
    handover: Handover,
    expected_use: ExpectedUse | None = None,
) -> None:
    """Ask for prefetches behind every layer that is still to come in this step but the last one;
    with `expected_use` their victims are those of the least. To be queued beside the kernels of the
    step, behind those of its first layer. On a CPU, where nothing runs beside, to be called behind
    every layer: it asks behind the last event if it has not yet, and returns."""
    device = pool.clock.device
    check_pool(pool, device)
    check_flights(flights, device)
    check_handover(handover, device)
    num_experts, per_layer, recorded, use_candidates = predictions
    num_layers, distances, width = flights.predicted.shape
    if not 1 <= per_layer <= width:
        raise ValueError(f"per_layer is {per_layer}, expected 1 to {width}")
    if recorded is not None:
        shape = (-1, num_layers, distances, per_layer)
        check("ids", recorded.ids, torch.int32, shape, device)
        check("step", recorded.step, torch.int64, (1,), device)
    if expected_use is not None:
        check_expected_use(expected_use, len(pool.slot_of), device, len(pool.owner))
    top_k = len(handover.slots)
    check("used", handover.used, torch.int32, (num_layers * top_k,), device)
    _schedule_kernel[(1,)](
        pool=pool,
        flights=flights,
        handover=handover,
        expected_use=expected_use,
        recorded=recorded,
        num_recorded=1 if recorded is None else len(recorded.ids),
        num_slots=len(pool.owner),
        limit_ns=lock.LIMIT_NS,
        E=num_experts,
        K=top_k,
        N=per_layer,
        NUM_LAYERS=num_layers,
        DISTANCES=distances,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_N=width,
        BLOCK_S=triton.next_power_of_2(len(pool.owner)),
        CANDIDATES=use_candidates,
        ON_HOST=flights.requests.device != device,
        num_warps=8,
        enable_fp_fusion=True,
    )
