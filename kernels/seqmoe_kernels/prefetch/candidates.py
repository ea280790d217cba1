"""What a forecast says about the step that begins: the likeliest absent experts, picked once a
step, so that every layer finds at hand what is worth a copy beyond the layers that look-ahead sees.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.pool.landing import check_flights
from seqmoe_kernels.state import CERTAIN, LEAST, Flights, PoolState

MOST_EXPERTS = 16384  # experts that one program can hold
_BITS = CERTAIN.bit_length() - 1  # of a probability; what is certain has one more
_LEAST, _CERTAIN, _NUM_TRIES = map(tl.constexpr, (LEAST, CERTAIN, _BITS + 1))


class StepForecast(NamedTuple):
    """How often each expert will be used in the step that begins, from 0 to 1: `expected` f32
    [R, N], of which row `step` (int64 [1]) modulo R holds, row 0 without a step."""

    expected: torch.Tensor
    step: torch.Tensor | None = None


def pick_candidates_reference(
    step_forecast: StepForecast, pool: PoolState, flights: Flights
) -> None:
    expected, step = step_forecast
    row = expected[0 if step is None else int(step) % len(expected)]
    likely = (row.clamp(0, 1) * CERTAIN).long()
    likely[pool.slot_of >= 0] = 0
    least, most = max(int(flights.rules[LEAST]), 1), len(flights.candidates)
    if len(likely) > most:
        least = max(least, int(likely.topk(most + 1).values[-1]) + 1)
    chosen = (likely >= least).nonzero().flatten()
    flights.candidates.fill_(-1)
    flights.candidates[: len(chosen)] = chosen.int()


@triton.jit
def _candidates_kernel(
    expected,
    step,
    num_rows,
    num_experts,
    pool,
    flights,
    NUM_CANDIDATES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    let_next_start(PDL)
    expert, i = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_H)
    inside = expert < num_experts
    row = 0
    if step is not None:
        row = (tl.load(step) % num_rows).to(tl.int32)
    use = tl.load(expected + row * num_experts + expert, mask=inside, other=0.0)
    slot = tl.load(pool.slot_of + expert, mask=inside, other=0)
    likely = (tl.minimum(tl.maximum(use, 0.0), 1.0) * _CERTAIN).to(tl.int32)
    likely = tl.where(slot < 0, likely, 0)
    # the least probability, from `low` to `high`, by which there are not too many
    low = tl.maximum(tl.load(flights.rules + _LEAST), 1).to(tl.int32)
    high = tl.maximum(low, _CERTAIN + 1)
    for _ in tl.static_range(_NUM_TRIES):
        middle = (low + high) // 2
        fits = tl.sum((likely >= middle).to(tl.int32), 0) <= NUM_CANDIDATES
        low, high = tl.where(fits, low, middle + 1), tl.where(fits, middle, high)
    chosen = likely >= high
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(
        flights.candidates + i,
        -1,
        mask=(i < NUM_CANDIDATES) & (i >= tl.sum(chosen.to(tl.int32), 0)),
    )
    tl.store(flights.candidates + place, expert, mask=chosen)


@verb(pick_candidates_reference)
def pick_candidates(step_forecast: StepForecast, pool: PoolState, flights: Flights) -> None:
    """Note in `flights.candidates` the absent experts that are likely to be used in the step that
    begins: at least LEAST of `flights.rules` probable, and as many as there is room for; of those
    at the limit that are equally probable all or none."""
    expected, step = step_forecast
    num_experts = len(pool.slot_of)
    if num_experts > MOST_EXPERTS:
        raise ValueError(f"{num_experts} experts, expected at most {MOST_EXPERTS}")
    check("expected", expected, torch.float32, (-1, num_experts), pool.clock.device)
    if step is not None:
        check("step", step, torch.int64, (1,), pool.clock.device)
    check_flights(flights, pool.clock.device)
    block = triton.next_power_of_2(num_experts)
    _candidates_kernel[(1,)](
        expected,
        step,
        len(expected),
        num_experts,
        pool,
        flights,
        len(flights.candidates),
        block,
        triton.next_power_of_2(len(flights.candidates)),
        num_warps=min(max(block // 512, 4), 16),
        enable_fp_fusion=True,
        **pdl_options(expected.device),
    )
