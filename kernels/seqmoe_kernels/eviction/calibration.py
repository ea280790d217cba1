"""How well forecasts have done: each is compared with what was used, once its window has ended."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.eviction.expected_use import SPAN, ExpectedUse, check_expected_use, width_of
from seqmoe_kernels.eviction.ghost_cache import (
    BLOCK,
    GhostCache,
    check_ghost,
    size_up,
    size_up_reference,
)
from seqmoe_kernels.eviction.units import NUM_WINDOWS
from seqmoe_kernels.state import PoolState

_W, _SPAN = tl.constexpr(NUM_WINDOWS), tl.constexpr(SPAN)


def calibrate_reference(
    used: torch.Tensor,
    top_k: int,
    pool: PoolState,
    expected_use: ExpectedUse,
    ghost: GhostCache | None = None,
) -> None:
    steps = int(expected_use.steps[1])
    known = used[used < len(expected_use.recent)].long()
    expected_use.recent.bitwise_left_shift_(1).bitwise_and_((1 << SPAN) - 1)
    expected_use.recent[known] += 1
    expected_use.steps[0] = steps
    if ghost is not None:
        size_up_reference(expected_use.recent & 1, steps == 0, pool, ghost)
    for w in range(NUM_WINDOWS):
        if steps >= 1 << w:
            _judge_reference(w, (steps - (1 << w)) % SPAN, expected_use)


def _judge_reference(window: int, place: int, expected_use: ExpectedUse) -> None:
    """A window has ended with the last step: its forecast was made at `place`."""
    width = width_of(window)
    used = sum((expected_use.recent >> back & 1).long() for back in range(width))
    guess = expected_use.rates[place].long() * width >> 12
    better = (expected_use.made[place, window].long() >> 12) - guess
    sums = expected_use.sums[1, window]
    errors = torch.stack(((((used << 12) - guess) * better).sum(), (better * better).sum()))
    expected_use.sums[0, window] = sums
    sums.add_(errors - (sums >> 6))
    top, base = sums.tolist()
    expected_use.trust[window] = min(max(256 * top // base, 0), 256) if base > 0 else 0


@triton.jit
def _judge_kernel(
    used,
    pool,
    expected_use,
    ghost,
    num_experts,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    expert = program * BLOCK + tl.arange(0, BLOCK)
    inside = expert < num_experts
    steps = tl.load(expected_use.steps + 1)
    if program == 0:
        tl.store(expected_use.steps, steps)
        i = tl.arange(0, 2 * _W)
        tl.store(expected_use.sums + i, tl.load(expected_use.sums + 2 * _W + i))
    k = tl.arange(0, BLOCK_K)
    at = (expert // E)[:, None] * K + k[None, :]
    ids = tl.load(used + at, mask=inside[:, None] & (k < K)[None, :], other=-1)
    hit = tl.sum((ids == expert[:, None]).to(tl.int32), 1)
    recent = ((tl.load(expected_use.recent + expert, mask=inside, other=0) << 1) | hit) & 255
    tl.debug_barrier()  # several threads may have the same expert: all read before one writes
    tl.store(expected_use.recent + expert, recent, mask=inside)
    if ghost is not None:
        size_up(expert, inside, hit, steps == 0, pool, ghost)
    for w in tl.static_range(_W):
        width = (1 << w) - (1 << w >> 1)
        place = (steps + _SPAN - (1 << w)) % _SPAN
        known = expert < tl.where(steps >= (1 << w), num_experts, 0)
        uses = tl.zeros((BLOCK,), tl.int64)
        for back in tl.static_range((1 << w) - (1 << w >> 1)):
            uses += (recent >> back) & 1
        rate = tl.load(expected_use.rates + place * num_experts + expert, mask=known, other=0)
        made = expected_use.made + (place * _W + w) * num_experts + expert
        guess = (rate.to(tl.int64) * width) >> 12
        better = (tl.load(made, mask=known, other=0).to(tl.int64) >> 12) - guess
        error = tl.where(known, (uses << 12) - guess, 0)
        part = expected_use.parts + (program * _W + w) * 2
        tl.store(part, tl.sum(error * better, 0))
        tl.store(part + 1, tl.sum(better * better, 0))


@verb(calibrate_reference)
def calibrate(
    used: torch.Tensor,
    top_k: int,
    pool: PoolState,
    expected_use: ExpectedUse,
    ghost: GhostCache | None = None,
) -> None:
    """A step begins: compare past forecasts with what the last step `used`, int32 [L * K], flat ids
    layer by layer, N or more for none. A `ghost` follows it; `update_expected_use` does the
    rest."""
    num_experts, num_layers = len(expected_use.recent), len(used) // top_k
    check("used", used, torch.int32, (num_layers * top_k,), used.device)
    check_expected_use(expected_use, num_experts, used.device)
    check_ghost(ghost, num_experts, used.device)
    _judge_kernel[(len(expected_use.parts),)](
        used,
        pool,
        expected_use,
        ghost,
        num_experts,
        num_experts // num_layers,
        top_k,
        triton.next_power_of_2(top_k),
        BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
        **pdl_options(used.device),
    )
