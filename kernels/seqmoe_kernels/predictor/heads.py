"""How often a predictor expects each expert to be used: the vector of each window of steps ahead is
compared with those of the experts; beside that the token and decayed counts have their say."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.dense.tensor_core_gemv import load_tile
from seqmoe_kernels.eviction.units import NUM_WINDOWS
from seqmoe_kernels.predictor.embed import StepInput, check_step_input
from seqmoe_kernels.predictor.f32_gemv import check_width, chunk_sums, narrow_tiling
from seqmoe_kernels.predictor.gru import sigmoid

LEAST_RATE = 0.01  # uses per step, added before a logarithm is taken

_NUM_WINDOWS, _LEAST_RATE = map(tl.constexpr, (NUM_WINDOWS, LEAST_RATE))


class ExpertHeads(NamedTuple):
    """W = 4 windows, J half-lives, L layers, N = L * E flat ids, each layer using K of its E."""

    experts: torch.Tensor  # [N, D]
    base: torch.Tensor  # f32 [W, N]
    by_counts: torch.Tensor  # f32 [J, W, L], times log2 of the rates of use
    decay: torch.Tensor  # f32 [J], of the counts in a step
    widths: torch.Tensor  # f32 [W], the steps of each window


class UseHistory(NamedTuple):
    """What a step leaves for the next one; `expected_uses` changes it in place."""

    counts: torch.Tensor  # f32 [J, N], decayed counts of uses
    states: torch.Tensor  # f32 [2, B, D], the states of the recurrent blocks: past and present


def expected_uses_reference(
    vectors: torch.Tensor,
    heads: ExpertHeads,
    step: StepInput,
    history: UseHistory,
    out: torch.Tensor,
) -> None:
    used, token, token_input = step
    history.states[0] = history.states[1]
    num_flat, num_layers = len(heads.experts), heads.by_counts.shape[2]
    known = used[used < num_flat].long()
    history.counts.mul_(heads.decay[:, None])
    history.counts[:, known] += 1
    rates = history.counts * (1 - heads.decay)[:, None]
    logs = torch.log2(rates + LEAST_RATE).view(len(rates), num_layers, -1)
    logits = vectors @ heads.experts.float().T + heads.base
    logits += torch.einsum("jle,jwl->wle", logs, heads.by_counts).flatten(1)
    if token_input is not None:
        vectors, matrix = token_input
        logits += (matrix.float() @ vectors[token[0]].float()).view_as(logits)
    out.copy_(logits.sigmoid() * heads.widths[:, None])


@triton.jit
def _outlook_kernel(
    vectors,
    heads,
    step,
    history,
    out,
    num_flat,
    num_states,
    num_layers,
    D: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_flat
    starts = row.to(tl.int64) * D
    column = tl.arange(0, BLOCK_D)
    ahead = load_tile(heads.experts, starts, inside, column, D)
    # What comes of token and uses waits for nothing: they were there before `sum_rows`.
    a = _direct(0, heads, step, row, inside, num_flat, R, BLOCK_R)
    b = _direct(1, heads, step, row, inside, num_flat, R, BLOCK_R)
    c = _direct(2, heads, step, row, inside, num_flat, R, BLOCK_R)
    d = _direct(3, heads, step, row, inside, num_flat, R, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    layer = row // E
    at = layer[:, None] * K + k[None, :]
    ids = tl.load(step.used + at, mask=inside[:, None] & (k < K)[None, :], other=-1)
    hit = tl.sum((ids == row[:, None]).to(tl.float32), 1)
    for j in tl.static_range(J):
        decay = tl.load(heads.decay + j)
        place = history.counts + j * num_flat + row
        count = tl.load(place, mask=inside, other=0) * decay + hit
        tl.debug_barrier()  # several threads have the same row: all of them read before one writes
        tl.store(place, count, mask=inside)
        log = tl.log2(count * (1 - decay) + _LEAST_RATE)
        weight = heads.by_counts + j * _NUM_WINDOWS * num_layers + layer
        a += log * tl.load(weight, mask=inside, other=0)
        b += log * tl.load(weight + num_layers, mask=inside, other=0)
        c += log * tl.load(weight + 2 * num_layers, mask=inside, other=0)
        d += log * tl.load(weight + 3 * num_layers, mask=inside, other=0)
    wait_for_inputs(PDL)
    if tl.program_id(0) == 0:
        s = tl.arange(0, BLOCK_S)
        state = tl.load(history.states + num_states + s, mask=s < num_states)
        tl.store(history.states + s, state, mask=s < num_states)
    dtype: tl.constexpr = heads.experts.dtype.element_ty
    CHUNK: tl.constexpr = 128 // dtype.primitive_bitwidth
    CHUNKS: tl.constexpr = BLOCK_D // CHUNK
    near = tl.zeros((ROWS, CHUNKS), tl.float32)
    second, third, far = near, near, near
    for first in range(0, D, TILES * BLOCK_D):
        for i in tl.static_range(TILES):
            tile, start = ahead, first + i * BLOCK_D
            if i + 1 < TILES or TILES * BLOCK_D < D:
                ahead = load_tile(heads.experts, starts, inside, start + BLOCK_D + column, D)
            tile = tl.reshape(tile, (ROWS, CHUNKS, CHUNK))
            near += chunk_sums(tile, _piece(vectors, start + column, D, CHUNKS, CHUNK))
            second += chunk_sums(tile, _piece(vectors + D, start + column, D, CHUNKS, CHUNK))
            third += chunk_sums(tile, _piece(vectors + 2 * D, start + column, D, CHUNKS, CHUNK))
            far += chunk_sums(tile, _piece(vectors + 3 * D, start + column, D, CHUNKS, CHUNK))
    _store(a + tl.sum(near, 1), 0, heads, out, row, inside, num_flat)
    _store(b + tl.sum(second, 1), 1, heads, out, row, inside, num_flat)
    _store(c + tl.sum(third, 1), 2, heads, out, row, inside, num_flat)
    _store(d + tl.sum(far, 1), 3, heads, out, row, inside, num_flat)


@triton.jit
def _direct(
    window: tl.constexpr, heads, step, row, inside, num_flat, R: tl.constexpr, BLOCK_R: tl.constexpr
):
    """The part of a window's logits that is there whatever was used: f32 [rows]."""
    row = window * num_flat + row
    logit = tl.load(heads.base + row, mask=inside, other=0)
    if R > 0:
        r = tl.arange(0, BLOCK_R)
        tile = load_tile(step.token_input.matrix, row.to(tl.int64) * R, inside, r, R)
        at = step.token_input.vectors + tl.load(step.token) * R + r
        value = tl.load(at, mask=r < R, other=0)
        logit += tl.sum(tile.to(tl.float32) * value.to(tl.float32)[None, :], 1)
    return logit


@triton.jit
def _piece(x, column, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    return tl.reshape(tl.load(x + column, mask=column < D, other=0), (CHUNKS, CHUNK))


@triton.jit
def _store(logit, window: tl.constexpr, heads, out, row, inside, num_flat):
    expected = sigmoid(logit) * tl.load(heads.widths + window)
    tl.store(out + window * num_flat + row, expected, mask=inside)


def _check_expected_uses(
    vectors: torch.Tensor,
    heads: ExpertHeads,
    step: StepInput,
    history: UseHistory,
    out: torch.Tensor,
) -> int:
    """Returns the rank of the token's vectors."""
    device, f32 = vectors.device, torch.float32
    check("experts", heads.experts, FLOATS, (-1, vectors.shape[1]), device)
    num_flat, width = heads.experts.shape
    check_width(width)
    check("vectors", vectors, f32, (NUM_WINDOWS, width), device)
    check("base", heads.base, f32, (NUM_WINDOWS, num_flat), device)
    num_half_lives = len(heads.decay)
    check("by_counts", heads.by_counts, f32, (num_half_lives, NUM_WINDOWS, -1), device)
    num_layers = heads.by_counts.shape[2]
    if num_flat % num_layers or len(step.used) % num_layers:
        raise ValueError(f"{num_layers} layers have {num_flat} experts and use {len(step.used)}")
    check("widths", heads.widths, f32, (NUM_WINDOWS,), device)
    check("counts", history.counts, f32, (num_half_lives, num_flat), device)
    check("states", history.states, f32, (2, -1, width), device)
    check("out", out, f32, (NUM_WINDOWS, num_flat), device)
    return check_step_input(step, NUM_WINDOWS * num_flat, device)


@verb(expected_uses_reference)
def expected_uses(
    vectors: torch.Tensor,
    heads: ExpertHeads,
    step: StepInput,
    history: UseHistory,
    out: torch.Tensor,
) -> None:
    """Write to `out` f32 [W, N] how often each expert will be used in each window.

    `vectors` f32 [W, D]; the matrix of the `token_input` is [W * N, R]. Counts the uses in
    `history`, and makes the present states the past ones. Between the kernels that write `step` and
    the counts and this one must be one that waits before it lets others start, as `sum_rows` does.
    """
    rank = _check_expected_uses(vectors, heads, step, history, out)
    (num_flat, width), num_layers = heads.experts.shape, heads.by_counts.shape[2]
    num_states, top_k = history.states[0].numel(), len(step.used) // num_layers
    # As measured on an H200: more rows, and so fewer reads of the windows' vectors, pay.
    tiling = narrow_tiling(16, width, heads.experts.dtype)
    _outlook_kernel[(triton.cdiv(num_flat, tiling.rows),)](
        vectors=vectors,
        heads=heads,
        step=step,
        history=history,
        out=out,
        num_flat=num_flat,
        num_states=num_states,
        num_layers=num_layers,
        D=width,
        E=num_flat // num_layers,
        K=top_k,
        J=len(heads.decay),
        R=rank,
        ROWS=tiling.rows,
        BLOCK_D=tiling.columns,
        TILES=tiling.tiles,
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_R=triton.next_power_of_2(max(rank, 1)),
        BLOCK_S=triton.next_power_of_2(num_states),
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
        **pdl_options(vectors.device),
    )
