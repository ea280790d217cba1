"""Sampling on a GPU, in six kernels that sort nothing and that the host does not wait for.

A coarse histogram of the distances (`integer_probs`), and then a fine one of a single bin, tell
where top-k cuts the order of the tokens, and the same again for top-p. Kernels that the settings
have no use for return at once: for greedy sampling all but the first and the last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.sampling.integer_probs import (
    NO_MASS,
    UNIT,
    distance_of,
    mass_of,
    random_share_of,
)
from seqmoe_kernels.sampling.state import (
    FREQUENCY,
    MIN_P,
    PRESENCE,
    REPEAT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplingState,
    check_sampling,
)

BLOCK = 1024  # tokens per program
BINS = 4096  # of a histogram: NO_MASS / BINS distances to a bin in a coarse one, 1 in a fine one

_BINS, _NO_MASS, _UNIT = map(tl.constexpr, (BINS, NO_MASS, UNIT))
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = map(tl.constexpr, (TEMPERATURE, TOP_K, TOP_P, MIN_P))
_REPEAT, _PRESENCE, _FREQUENCY = map(tl.constexpr, (REPEAT, PRESENCE, FREQUENCY))
_AT_TOP_K, _AT_TOP_P, _AT_END = map(tl.constexpr, (0, 2, 4))  # in `_Scratch.cuts`


class _Scratch(NamedTuple):
    """What the kernels of one choice leave for those after them. B blocks of tokens."""

    logits: torch.Tensor  # f32 [V], with penalties
    peaks: torch.Tensor  # f32 [B]: the largest logit of each block
    peak_ids: torch.Tensor  # int32 [B]
    distances: torch.Tensor  # int32 [V]
    bins: torch.Tensor  # int64 [5, BINS]: all histograms, which are the next five
    counts: torch.Tensor  # coarse
    masses: torch.Tensor
    fine_counts: torch.Tensor  # of the bin where top-k cuts
    fine_masses: torch.Tensor
    top_p_masses: torch.Tensor  # of the bin where top-p cuts
    cuts: torch.Tensor  # int64 [6]: bin and rest of top-k, of top-p; distance and ties of the last
    block_masses: torch.Tensor  # int64 [B]: of the tokens kept that are nearer than the cut
    block_ties: torch.Tensor  # int64 [B]: how many tokens lie at the cut


def _scratch(vocab_size: int, num_blocks: int, device: torch.device) -> _Scratch:
    def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    bins = new(torch.int64, 5, BINS)
    counts, masses, fine_counts, fine_masses, top_p_masses = bins
    return _Scratch(
        new(torch.float32, vocab_size),
        new(torch.float32, num_blocks),
        new(torch.int32, num_blocks),
        new(torch.int32, vocab_size),
        bins,
        *(counts, masses, fine_counts, fine_masses, top_p_masses),
        new(torch.int64, 6),
        new(torch.int64, num_blocks),
        new(torch.int64, num_blocks),
    )


@triton.jit
def _penalty_kernel(logits, state, scratch, vocab_size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Applies the penalties, finds each block's largest logit, clears the histograms."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    block = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    for start in range(block * BLOCK, 5 * _BINS, tl.num_programs(0) * BLOCK):
        tl.store(scratch.bins + start + i, tl.zeros((BLOCK,), tl.int64))
    token = block * BLOCK + i
    inside = token < vocab_size
    logit = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    count = tl.load(state.counts + token, mask=inside, other=0)
    seen = tl.load(state.seen + token, mask=inside, other=0)
    repeat = tl.load(state.settings + _REPEAT)
    scaled = tl.where(logit > 0, tl.div_rn(logit, repeat), logit * repeat)
    logit = tl.where(seen, scaled, logit) - tl.load(state.settings + _FREQUENCY) * count
    logit -= tl.where(count > 0, tl.load(state.settings + _PRESENCE), 0.0)
    tl.store(scratch.logits + token, logit, mask=inside)
    peak = tl.max(logit, 0)
    tl.store(scratch.peaks + block, peak)
    tl.store(scratch.peak_ids + block, tl.min(tl.where(logit == peak, token, vocab_size - 1), 0))


@triton.jit
def _distances(scratch, block, vocab_size, BLOCK: tl.constexpr):
    token = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(scratch.distances + token, mask=token < vocab_size, other=_NO_MASS)


@triton.jit
def _note(place, first, second):
    """All programs know it, one writes it down."""
    if tl.program_id(0) == 0:
        tl.store(place, first)
        tl.store(place + 1, second)


@triton.jit
def _add(counts, masses, at, distance, mask):
    tl.atomic_add(counts + at, tl.full(at.shape, 1, tl.int64), mask=mask, sem="relaxed")
    tl.atomic_add(masses + at, mass_of(distance), mask=mask, sem="relaxed")


@triton.jit
def _crossing(bins, amount):
    """The first bin up to which the sum reaches `amount`, and what it must contribute to that."""
    bin = tl.arange(0, _BINS)
    end = tl.cumsum(tl.load(bins + bin), 0)
    short = end < amount
    return tl.sum(short.to(tl.int64), 0), amount - tl.max(tl.where(short, end, 0), 0)


@triton.jit
def _sum_below(bins, end):
    bin = tl.arange(0, _BINS)
    return tl.sum(tl.load(bins + bin, mask=bin < end, other=0), 0)


@triton.jit
def _distance_kernel(
    state, scratch, vocab_size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr
):
    """Turns logits into distances, and counts and weighs them by coarse bins."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    temperature = tl.load(state.settings + _TEMPERATURE)
    if temperature == 0:
        return
    block = tl.arange(0, BLOCKS)
    inside = block < tl.num_programs(0)
    peak = tl.max(tl.load(scratch.peaks + block, mask=inside, other=float("-inf")), 0)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    logit = tl.load(scratch.logits + token, mask=inside, other=float("-inf"))
    distance = distance_of(logit, peak, temperature)
    tl.store(scratch.distances + token, distance, mask=inside)
    top_k, top_p = tl.load(state.settings + _TOP_K), tl.load(state.settings + _TOP_P)
    if (top_k > 0) | (top_p < 1):
        bin = distance // _BINS
        _add(scratch.counts, scratch.masses, bin, distance, inside & (distance < _NO_MASS))


@triton.jit
def _top_k_kernel(state, scratch, vocab_size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Finds the coarse bin where top-k cuts, and counts and weighs its distances."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    top_k = tl.load(state.settings + _TOP_K).to(tl.int64)
    if (tl.load(state.settings + _TEMPERATURE) == 0) | (top_k == 0):
        return
    bin, rest = _crossing(scratch.counts, top_k)
    _note(scratch.cuts + _AT_TOP_K, bin, rest)
    distance = _distances(scratch, tl.program_id(0), vocab_size, BLOCK)
    chosen = (distance // _BINS == bin) & (distance < _NO_MASS)
    _add(scratch.fine_counts, scratch.fine_masses, distance % _BINS, distance, chosen)


@triton.jit
def _top_k_cut(scratch):
    """The distance where top-k cuts, and how many tokens at this distance it keeps."""
    bin = tl.load(scratch.cuts + _AT_TOP_K)
    fine, ties = _crossing(scratch.fine_counts, tl.load(scratch.cuts + _AT_TOP_K + 1))
    return bin * _BINS + fine, ties  # NO_MASS or more, if fewer than top-k tokens have a mass


@triton.jit
def _top_p_kernel(state, scratch, vocab_size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Finds the coarse bin where top-p cuts what top-k left, and weighs its distances."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    top_p = tl.load(state.settings + _TOP_P)
    if (tl.load(state.settings + _TEMPERATURE) == 0) | (top_p >= 1):
        return
    cut = tl.full((), _NO_MASS, tl.int64)
    ties = tl.full((), 0, tl.int64)
    if tl.load(state.settings + _TOP_K) > 0:
        cut, ties = _top_k_cut(scratch)
    left = _sum_below(scratch.masses, cut // _BINS)
    left += _sum_below(scratch.fine_masses, cut % _BINS) + ties * mass_of(cut)
    wanted = tl.ceil(top_p.to(tl.float64) * left.to(tl.float64)).to(tl.int64)
    bin, rest = _crossing(scratch.masses, tl.maximum(wanted, 1))
    _note(scratch.cuts + _AT_TOP_P, bin, rest)
    distance = _distances(scratch, tl.program_id(0), vocab_size, BLOCK)
    chosen = (distance // _BINS == bin) & (distance < _NO_MASS)
    at = scratch.top_p_masses + distance % _BINS
    tl.atomic_add(at, mass_of(distance), mask=chosen, sem="relaxed")


@triton.jit
def _last_cut(state, scratch):
    """The distance where the last filter cuts, and how many tokens at this distance it keeps."""
    cut = tl.full((), _NO_MASS, tl.int64)
    ties = tl.full((), 0, tl.int64)
    if tl.load(state.settings + _TOP_P) < 1:  # a first part of what top-k left
        bin = tl.load(scratch.cuts + _AT_TOP_P)
        fine, rest = _crossing(scratch.top_p_masses, tl.load(scratch.cuts + _AT_TOP_P + 1))
        cut = bin * _BINS + fine
        ties = tl.cdiv(rest, mass_of(cut))
    elif tl.load(state.settings + _TOP_K) > 0:
        cut, ties = _top_k_cut(scratch)
    return cut, ties


@triton.jit
def _kept_mass(distance, state):
    """Mass of a token that comes before the cut: what it has, or nothing if min-p drops it."""
    least = tl.ceil(tl.load(state.settings + _MIN_P).to(tl.float64) * _UNIT).to(tl.int64)
    mass = mass_of(distance)
    return tl.where(mass >= least, mass, 0)


@triton.jit
def _weigh_kernel(state, scratch, vocab_size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Finds the last cut, weighs what each block has before it and counts what lies at it."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    if tl.load(state.settings + _TEMPERATURE) == 0:
        return
    block = tl.program_id(0)
    cut, ties = _last_cut(state, scratch)
    _note(scratch.cuts + _AT_END, cut, ties)
    distance = _distances(scratch, block, vocab_size, BLOCK)
    mass = tl.where(distance < cut, _kept_mass(distance, state), 0)
    tl.store(scratch.block_masses + block, tl.sum(mass, 0))
    tl.store(scratch.block_ties + block, tl.sum((distance == cut).to(tl.int64), 0))


@triton.jit
def _drawn(state, scratch, num_blocks, vocab_size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The token at a random share of the mass kept, counted by id."""
    cut, ties = tl.load(scratch.cuts + _AT_END), tl.load(scratch.cuts + _AT_END + 1)
    i = tl.arange(0, BLOCKS)
    inside = i < num_blocks
    block_ties = tl.load(scratch.block_ties + i, mask=inside, other=0)
    ties_before = tl.cumsum(block_ties, 0) - block_ties
    block_ties = tl.minimum(block_ties, tl.maximum(ties - ties_before, 0))
    mass = tl.load(scratch.block_masses + i, mask=inside, other=0)
    end = tl.cumsum(mass + block_ties * _kept_mass(cut, state), 0)
    spot = (random_share_of(state.stream) * tl.max(end, 0).to(tl.float64)).to(tl.int64)
    block = tl.sum((end <= spot).to(tl.int32), 0)
    spot -= tl.max(tl.where(end <= spot, end, 0), 0)
    ties = tl.sum(tl.where(i == block, block_ties, 0), 0)
    distance = _distances(scratch, block, vocab_size, BLOCK)
    tie = distance == cut
    kept = (distance < cut) | (tie & (tl.cumsum(tie.to(tl.int64), 0) <= ties))
    end = tl.cumsum(tl.where(kept, _kept_mass(distance, state), 0), 0)
    return block * BLOCK + tl.sum((end <= spot).to(tl.int32), 0)


@triton.jit
def _draw_kernel(
    state,
    scratch,
    chosen,
    num_blocks,
    vocab_size,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: draws a token or takes the likeliest, and counts it as part of the answer."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    if tl.load(state.settings + _TEMPERATURE) == 0:
        i = tl.arange(0, BLOCKS)
        peak = tl.load(scratch.peaks + i, mask=i < num_blocks, other=float("-inf"))
        peak_id = tl.load(scratch.peak_ids + i, mask=i < num_blocks, other=vocab_size - 1)
        token = tl.min(tl.where(peak == tl.max(peak, 0), peak_id, vocab_size - 1), 0)
    else:
        token = _drawn(state, scratch, num_blocks, vocab_size, BLOCK, BLOCKS)
    token = tl.minimum(token, vocab_size - 1).to(tl.int64)  # whatever NaN there are: a token
    number, count = tl.load(state.stream + 1), tl.load(state.counts + token)
    tl.debug_barrier()  # all threads have read what one of them writes now
    tl.store(chosen, token)
    tl.store(state.stream + 1, number + 1)
    tl.store(state.counts + token, count + 1)
    tl.store(state.seen + token, True)


def launch_sampling(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """Choose a token id, int64 [1], from logits [V] in f32, bf16 or f16, and count it as part of
    the answer.

    Order: repeat penalty (divides positive and multiplies negative logits of tokens seen),
    frequency and presence penalty (subtracted for tokens of the answer), temperature, top-k, top-p,
    min-p, draw. Each filter looks at the probabilities that the one before it left over,
    renormalised. Temperature 0 takes the largest logit. Equal logits: the lower id comes first.
    The draw takes the token at a random share of the total, counted by id. Never waits for a GPU.
    """
    check_sampling(logits, state)
    vocab_size = len(logits)
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    blocks = triton.next_power_of_2(num_blocks)
    scratch = _scratch(vocab_size, num_blocks, logits.device)
    chosen = torch.empty(1, dtype=torch.int64, device=logits.device)
    each = {
        "state": state,
        "scratch": scratch,
        "vocab_size": vocab_size,
        "BLOCK": BLOCK,
        "num_warps": 8,
        "enable_fp_fusion": False,  # a fused multiply-add would round otherwise than the reference
        **pdl_options(logits.device),
    }
    grid = (num_blocks,)
    _penalty_kernel[grid](logits=logits, **each)
    _distance_kernel[grid](BLOCKS=blocks, **each)
    _top_k_kernel[grid](**each)
    _top_p_kernel[grid](**each)
    _weigh_kernel[grid](**each)
    _draw_kernel[(1,)](chosen=chosen, num_blocks=num_blocks, BLOCKS=blocks, **each)
    return chosen
