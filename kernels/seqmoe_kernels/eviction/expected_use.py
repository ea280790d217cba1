"""What is expected of every expert: a forecast of its uses, mixed with the rate of its past uses
by how well the forecast has done lately. The victim of a miss is the expert that is worth least.

Integers alone decide, so that every device, and the simulator, comes to the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import Sizes, check, check_all, zeros
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.eviction.ghost_cache import (
    BLOCK,
    GhostCache,
    check_ghost,
    go_on,
    go_on_reference,
)
from seqmoe_kernels.eviction.units import GAP_SHIFT, NUM_WINDOWS, ONE, WINDOWS
from seqmoe_kernels.state import RULE_NOW, PoolState

SPAN = WINDOWS[-1][1]  # steps that the windows reach; window w ends 2^w steps ahead
TAIL, PER_STEP = NUM_WINDOWS, NUM_WINDOWS + 1  # places in ExpectedUse.weights

_W, _SPAN, _TAIL, _PER_STEP = map(tl.constexpr, (NUM_WINDOWS, SPAN, TAIL, PER_STEP))
_RULE_NOW, _GAP_SHIFT = tl.constexpr(RULE_NOW), tl.constexpr(GAP_SHIFT)
_ONE, _INTEGERS_FROM = tl.constexpr(float(ONE)), tl.constexpr(float(1 << 23))


class ExpectedUse(NamedTuple):
    """N experts by flat id, W = 4 windows of steps ahead: 1, 2, 3-4 and 5-8; P parts of a sum."""

    made: torch.Tensor  # int32 [8, W, N], forecasts of the last steps; that of step n at n % 8
    rates: torch.Tensor  # int32 [8, N], rates of use at the same times
    recent: torch.Tensor  # int32 [N], bit n: used in the step n before the last one
    parts: torch.Tensor  # int64 [P, W, 2]
    sums: torch.Tensor  # int64 [2, W, 2], of errors; as they were and as they are
    trust: torch.Tensor  # int64 [W], in the forecast, in units of 1/256
    mixed: torch.Tensor  # int32 [W, N], uses expected in each window
    likely: torch.Tensor  # f32 [1, N], those in the step that begins, in uses
    coming: torch.Tensor  # int64 [N], what an expert is worth while its layer is to come,
    passed: torch.Tensor  # int64 [N], once that is over in this step,
    again: torch.Tensor  # int64 [N], and if the step has used it
    slot_coming: torch.Tensor  # int64 [S], what the expert of each slot is worth: `coming`,
    slot_passed: torch.Tensor  # int64 [S], and `passed` or `again`
    steps: torch.Tensor  # int64 [2], without an interruption; as they were and as they are
    exp2: torch.Tensor  # int32 [256], 2^x for x in [0, 1), in units of 1/ONE
    weights: torch.Tensor  # int64 [W + 2], of the windows, of the time behind them, rate of a count

    @classmethod
    def unknown(
        cls,
        num_experts: int,
        num_slots: int,
        exp2: torch.Tensor,
        weights: torch.Tensor,
        device: torch.device,
    ) -> ExpectedUse:
        """Before the first step."""
        known = {"exp2": exp2.to(device, torch.int32), "weights": weights.to(device, torch.int64)}
        return cls(**zeros(_sizes(num_experts, num_slots), device) | known)


def _sizes(num_experts: int, num_slots: int) -> Sizes:
    """Of `ExpectedUse`."""
    f32, i32, i64 = torch.float32, torch.int32, torch.int64
    return {
        "made": (i32, (SPAN, NUM_WINDOWS, num_experts)),
        "rates": (i32, (SPAN, num_experts)),
        "recent": (i32, (num_experts,)),
        "parts": (i64, (triton.cdiv(num_experts, BLOCK), NUM_WINDOWS, 2)),
        "sums": (i64, (2, NUM_WINDOWS, 2)),
        "trust": (i64, (NUM_WINDOWS,)),
        "mixed": (i32, (NUM_WINDOWS, num_experts)),
        "likely": (f32, (1, num_experts)),
        "coming": (i64, (num_experts,)),
        "passed": (i64, (num_experts,)),
        "again": (i64, (num_experts,)),
        "slot_coming": (i64, (num_slots,)),
        "slot_passed": (i64, (num_slots,)),
        "steps": (i64, (2,)),
        "exp2": (i32, (256,)),
        "weights": (i64, (NUM_WINDOWS + 2,)),
    }


def check_expected_use(
    expected_use: ExpectedUse, num_experts: int, device: torch.device, num_slots: int = -1
) -> None:
    check_all(expected_use, _sizes(num_experts, num_slots), device)


def width_of(window: int) -> int:
    return max(1 << window >> 1, 1)


def update_expected_use_reference(
    expected: torch.Tensor,
    pool: PoolState,
    expected_use: ExpectedUse,
    ghost: GhostCache | None = None,
) -> None:
    steps = int(expected_use.steps[0])
    if ghost is not None:
        go_on_reference(expected_use.recent & 1, steps == 0, pool, ghost)
    rate = rate_reference(pool.usage, pool, expected_use)
    worth, gain = expected_use.weights[TAIL] * rate, int(expected_use.weights[TAIL])
    forecast = torch.round(expected * ONE).int()
    for w in range(NUM_WINDOWS):
        goes_on, trust = rate * width_of(w), int(expected_use.trust[w])
        mixed = goes_on + (trust * (forecast[w] - goes_on) >> 8)
        expected_use.mixed[w] = mixed
        if w:
            weight = int(expected_use.weights[w])
            worth = worth + weight * mixed
            gain += weight * width_of(w) * (256 - trust) >> 8
    expected_use.made[steps % SPAN], expected_use.rates[steps % SPAN] = forecast, rate.int()
    expected_use.likely.copy_(expected_use.mixed[:1] / ONE)
    expected_use.passed.copy_(worth)
    expected_use.coming.copy_(worth + expected_use.weights[0] * expected_use.mixed[0].long())
    raised = rate_reference(_used_now_reference(pool), pool, expected_use)
    expected_use.again.copy_(worth + gain * (raised - rate))
    here = pool.slot_of >= 0
    expected_use.slot_coming[pool.slot_of[here].long()] = expected_use.coming[here]
    expected_use.slot_passed[pool.slot_of[here].long()] = expected_use.passed[here]
    expected_use.steps[1] = steps + 1


def _used_now_reference(pool: PoolState) -> torch.Tensor:
    """The scores of all experts if they were used now."""
    now = pool.rule[RULE_NOW]
    gap = ((pool.usage - now).abs() >> GAP_SHIFT).clamp(max=len(pool.log_sums) - 1)
    return torch.maximum(pool.usage, now) + pool.log_sums[gap]


def rate_reference(score: torch.Tensor, pool: PoolState, expected_use: ExpectedUse) -> torch.Tensor:
    """Uses per step, int64 in units of 1/ONE, that decayed counts of these scores let expect."""
    exponent = score - pool.rule[RULE_NOW]
    whole, mantissa = exponent >> 16, expected_use.exp2[(exponent >> 8) & 255].long()
    return (mantissa << whole.clamp(min=0) >> (-whole).clamp(0, 63)) * expected_use.weights[
        PER_STEP
    ] >> 24


@triton.jit
def rate_of(score, pool, expected_use, mask):
    """Uses per step, int64 in units of 1/ONE, that decayed counts of these scores let expect."""
    exponent = score - tl.load(pool.rule + _RULE_NOW)
    whole = exponent >> 16
    mantissa = tl.load(expected_use.exp2 + ((exponent >> 8) & 255), mask=mask, other=0).to(tl.int64)
    shifted = (mantissa << tl.maximum(whole, 0)) >> tl.minimum(tl.maximum(-whole, 0), 63)
    return (shifted * tl.load(expected_use.weights + _PER_STEP)) >> 24


@triton.jit
def _mix_kernel(
    expected,
    pool,
    expected_use,
    ghost,
    num_experts,
    num_slots,
    num_parts,
    num_gaps,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    expert = program * BLOCK + tl.arange(0, BLOCK)
    inside = expert < num_experts
    steps, p = tl.load(expected_use.steps), tl.arange(0, BLOCK_P)
    place = steps % _SPAN
    score = tl.load(pool.usage + expert, mask=inside, other=0)
    if ghost is not None:
        hit = tl.load(expected_use.recent + expert, mask=inside, other=0) & 1
        go_on(
            expert, inside, hit, steps == 0, score, pool, ghost, num_experts, num_slots,
            num_parts, BLOCK_P,
        )  # fmt: skip
    rate = rate_of(score, pool, expected_use, inside)
    tl.store(expected_use.rates + place * num_experts + expert, rate.to(tl.int32), mask=inside)
    gain = tl.load(expected_use.weights + _TAIL)
    worth = gain * rate
    first = worth
    for w in tl.static_range(_W):
        width = (1 << w) - (1 << w >> 1)
        part = expected_use.parts + (p * _W + w) * 2
        top, base = tl.load(expected_use.sums + 2 * w), tl.load(expected_use.sums + 2 * w + 1)
        if steps >= (1 << w):
            top += tl.sum(tl.load(part, mask=p < num_parts, other=0), 0) - (top >> 6)
            base += tl.sum(tl.load(part + 1, mask=p < num_parts, other=0), 0) - (base >> 6)
        trust = tl.minimum(tl.maximum(top * 256 // tl.maximum(base, 1), 0), 256)
        trust = tl.where(base > 0, trust, 0)
        if program == 0:
            tl.store(expected_use.sums + 2 * _W + 2 * w, top)
            tl.store(expected_use.sums + 2 * _W + 2 * w + 1, base)
            tl.store(expected_use.trust + w, trust)
        uses = tl.load(expected + w * num_experts + expert, mask=inside, other=0) * _ONE
        whole = tl.where(uses < _INTEGERS_FROM, (uses + _INTEGERS_FROM) - _INTEGERS_FROM, uses)
        forecast = whole.to(tl.int64)
        made = expected_use.made + (place * _W + w) * num_experts + expert
        tl.store(made, forecast.to(tl.int32), mask=inside)
        goes_on = rate * width
        mixed = goes_on + ((trust * (forecast - goes_on)) >> 8)
        tl.store(expected_use.mixed + w * num_experts + expert, mixed.to(tl.int32), mask=inside)
        weight = tl.load(expected_use.weights + w)
        if w == 0:
            first = weight * mixed
            tl.store(expected_use.likely + expert, mixed.to(tl.float32) / _ONE, mask=inside)
        else:
            worth += weight * mixed
            gain += (weight * width * (256 - trust)) >> 8
    now = tl.load(pool.rule + _RULE_NOW)
    gap = tl.minimum(tl.abs(score - now) >> _GAP_SHIFT, num_gaps - 1)
    used = tl.maximum(score, now) + tl.load(pool.log_sums + gap, mask=inside, other=0)
    again = worth + gain * (rate_of(used, pool, expected_use, inside) - rate)
    slot = tl.load(pool.slot_of + expert, mask=inside, other=-1)
    tl.store(expected_use.passed + expert, worth, mask=inside)
    tl.store(expected_use.coming + expert, worth + first, mask=inside)
    tl.store(expected_use.again + expert, again, mask=inside)
    tl.store(expected_use.slot_passed + slot, worth, mask=slot >= 0)
    tl.store(expected_use.slot_coming + slot, worth + first, mask=slot >= 0)
    if program == 0:
        tl.store(expected_use.steps + 1, steps + 1)


@verb(update_expected_use_reference)
def update_expected_use(
    expected: torch.Tensor,
    pool: PoolState,
    expected_use: ExpectedUse,
    ghost: GhostCache | None = None,
) -> None:
    """Once past forecasts are judged: mix the new one, `expected` f32 [W, N] uses, with the rates
    that `pool.usage` lets expect, decayed counts that RULE_NOW has been set on for. From now on the
    victims of this step can be chosen. A `ghost` goes on by a step, see `calibrate`."""
    num_experts = len(pool.slot_of)
    check("expected", expected, torch.float32, (NUM_WINDOWS, num_experts), expected.device)
    check_expected_use(expected_use, num_experts, expected.device, len(pool.owner))
    check_ghost(ghost, num_experts, expected.device)
    _mix_kernel[(len(expected_use.parts),)](
        expected,
        pool,
        expected_use,
        ghost,
        num_experts,
        len(pool.owner),
        len(expected_use.parts),
        len(pool.log_sums),
        triton.next_power_of_2(len(expected_use.parts)),
        BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
        **pdl_options(expected.device),
    )
