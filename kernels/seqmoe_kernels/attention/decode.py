"""Attention of one decode step in one kernel: norm, rotation, KV state, softmax.

The positions are cut into spans, one program per span and KV head, so that a long context keeps the
whole GPU busy. Every program normalises and rotates the query heads of its group; the one whose
span holds the new position also stores the new key and value there and takes them into its softmax
straight from registers. The last program of a KV head to finish merges the spans, in their order.
The grid covers the capacity, and a program past the current length returns at once: the host never
needs to know the length.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from seqmoe_kernels.attention.decode_parts import (
    attend,
    dot_halves,
    gains,
    halves,
    merge,
    norm_factor,
    put,
    rotated,
    tile,
)
from seqmoe_kernels.attention.rope import Rotation, rotary_reference
from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.dense.norm import rms_norm_reference
from seqmoe_kernels.dense.tensor_core_gemv import operand_dtype

SPAN = 64  # the fewest positions of a span; multiples of it in contexts beyond MAX_SPANS of them
TILE = 64  # positions that a program has on its way at once, at most
NUM_WARPS = 8
MAX_SPANS = 32  # per KV head, so that merging them is one read
MAX_PROGRAMS = 128  # of all KV heads: about as many as run side by side on a large GPU
MERGED_ELEMENTS = 2**15  # that a program can hold while it merges
MAX_HEAD_DIM = 256


def attention_step_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    rotation: Rotation,
    scale: float,
) -> torch.Tensor:
    length, (_, num_kv_heads, dim) = int(position) + 1, keys.shape

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = rms_norm_reference(x.view(-1, weight.numel()), weight, rotation.eps)
        return rotary_reference(x.view(1, -1, dim), position, rotation.inv_freq)[0]

    keys[length - 1] = turned(k, rotation.k_norm)
    values[length - 1] = v.view(num_kv_heads, dim)
    heads = turned(q, rotation.q_norm).float().view(num_kv_heads, -1, dim)  # [m, n / m, D]
    scores = heads @ keys[:length].float().permute(1, 2, 0) * scale  # [m, n / m, length]
    mixed: torch.Tensor = scores.softmax(-1) @ values[:length].float().transpose(0, 1)
    return mixed.view(1, -1).to(q.dtype)


@triton.jit
def _attention_step_kernel(
    q,
    k,
    v,
    keys,
    values,
    position,
    rotation,
    sums,
    peaks,
    totals,
    arrivals,
    out,
    scale_log2,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OPERAND: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head, num_kv_heads = tl.program_id(0), tl.num_programs(0)
    let_next_start(PDL)
    g, i, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_HALF), tl.arange(0, 2 * BLOCK_HALF)
    head = kv_head * GROUP + g
    q_at, k_at = head[:, None] * D, (kv_head + 0 * g)[:, None] * D  # the same key in every row
    q_mask, k_mask = (g < GROUP)[:, None] & (i < D // 2)[None, :], (i < D // 2)[None, :]
    inv_freq, q_norm, k_norm, eps = rotation
    frequency = tl.load(inv_freq + i, mask=i < D // 2, other=0)
    q_gain = gains(q_norm, q_at, i, q_mask, D, Q_NORM)
    k_gain = gains(k_norm, k_at, i, k_mask, D, K_NORM)

    here = tl.load(position, cache_modifier=".cg").to(tl.int32)
    length = SPAN * tl.cdiv(here + 1, SPAN * SPANS)
    first = tl.program_id(1) * length
    if first > here:
        wait_for_inputs(PDL)  # a kernel that has ended stands for all before it
        return
    end = tl.minimum(first + length, here)  # of what is in the KV state already
    row = first + tl.arange(0, TILE)
    # On its way while the projections are computed, as each next tile is while one is attended to.
    ahead = tile(keys, values, row, end, i, d, kv_head, num_kv_heads, D)
    angle = here.to(tl.float32) * frequency
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    wait_for_inputs(PDL)
    query = halves(q, q_at + i[None, :], q_mask, D)
    key = halves(k, k_at + i[None, :], k_mask, D)
    new_value = tl.load(v + kv_head * D + d, mask=d < D, other=0)
    query = rotated(query, norm_factor(q, query, eps, D, Q_NORM), q_gain, cos, sin)
    key = rotated(key, norm_factor(k, key, eps, D, K_NORM), k_gain, cos, sin)

    owner = here < first + length
    if owner:
        put(keys, values, key, new_value, here, g, i, d, kv_head, num_kv_heads, D)
    peak = tl.where(owner, dot_halves(query, key) * scale_log2, float("-inf"))
    total = tl.where(owner, tl.full((BLOCK_G,), 1.0, tl.float32), 0.0)
    mixed = total[:, None] * new_value.to(tl.float32)[None, :]

    query = query[0].to(OPERAND), query[1].to(OPERAND)
    for start in range(first, end, TILE):
        now, row = ahead, start + tl.arange(0, TILE)
        ahead = tile(keys, values, row + TILE, end, i, d, kv_head, num_kv_heads, D)
        seen = (row < end)[None, :]
        peak, total, mixed = attend(query, now, seen, scale_log2, peak, total, mixed)

    count = tl.cdiv(here + 1, length)
    whole = (g < GROUP)[:, None] & (d < D)[None, :]
    if count == 1:
        mean = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + head[:, None] * D + d[None, :], mean, mask=whole)
    else:
        part = head * SPANS + tl.program_id(1)
        tl.store(sums + part[:, None] * D + d[None, :], mixed, mask=whole)
        tl.store(peaks + part, peak, mask=g < GROUP)
        tl.store(totals + part, total, mask=g < GROUP)
        tl.debug_barrier()  # all of that comes before the arrival
        arrived = tl.atomic_add(arrivals + kv_head, 1, sem="acq_rel", scope="gpu")
        if arrived == count - 1:
            tl.store(arrivals + kv_head, 0)  # for the next launch
            merge(sums, peaks, totals, out, kv_head, count, D, GROUP, SPANS)


@functools.cache
def _arrivals(device: torch.device, num_kv_heads: int) -> torch.Tensor:
    """How many programs of each KV head have finished: zero between launches, which have to follow
    each other on one stream."""
    return torch.zeros(num_kv_heads, dtype=torch.int32, device=device)


def _check_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    rotation: Rotation,
) -> None:
    device = q.device
    check("keys", keys, FLOATS, (-1, -1, -1), device)
    dtype, (capacity, num_kv_heads, dim) = keys.dtype, keys.shape
    check("values", values, dtype, (capacity, num_kv_heads, dim), device)
    check("q", q.view(1, -1), dtype, (1, -1), device)
    check("k", k, dtype, (1, num_kv_heads * dim), device)
    check("v", v, dtype, (1, num_kv_heads * dim), device)
    check("position", position, torch.int64, (1,), device)
    if q.numel() % (num_kv_heads * dim) or q.numel() == 0:
        raise ValueError(f"q has {q.numel()} elements, expected a multiple of {k.numel()}, as of k")
    if dim % 2 or dim > MAX_HEAD_DIM:
        raise ValueError(f"keys have head dimension {dim}, expected an even one <= {MAX_HEAD_DIM}")
    check("inv_freq", rotation.inv_freq, torch.float32, (dim // 2,), device)
    for name, weight, width in (
        ("q_norm", rotation.q_norm, q.numel()),
        ("k_norm", rotation.k_norm, k.numel()),
    ):
        if weight is not None:
            check(name, weight, dtype, (dim if weight.numel() == dim else width,), device)


def _most_spans(num_kv_heads: int, span_elements: int) -> int:
    """A power of two that depends on the model alone."""
    most = min(MAX_SPANS, MAX_PROGRAMS // num_kv_heads, MERGED_ELEMENTS // span_elements)
    return 1 << max(most, 1).bit_length() - 1


@verb(attention_step_reference)
def attention_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    rotation: Rotation,
    scale: float,
) -> torch.Tensor:
    """Attend with one token's raw projections `q` [1, n * D] (or [n * D]), `k`, `v` [1, m * D].

    Normalises and rotates queries and keys, writes the key and the value at `position` (int64 [1],
    below C) of `keys` and `values` [C, m, D], and attends over the positions up to it: [1, n * D]
    in the dtype of `q`. Query head i reads KV head i // (n / m). Scores, softmax and sums are f32,
    and the result does not depend on the capacity C. Calls on a device follow each other on one
    stream.
    """
    _check_step(q, k, v, keys, values, position, rotation)
    capacity, num_kv_heads, dim = keys.shape
    num_heads = q.numel() // dim
    group = num_heads // num_kv_heads
    block_half = max(triton.next_power_of_2(dim // 2), 16)
    spans = _most_spans(num_kv_heads, triton.next_power_of_2(group) * 2 * block_half)
    parts = torch.empty((num_heads * spans * (dim + 2),), dtype=torch.float32, device=q.device)
    sums, peaks, totals = parts.split([num_heads * spans * n for n in (dim, 1, 1)])
    out = torch.empty((1, num_heads * dim), dtype=q.dtype, device=q.device)
    wide = q.dtype == torch.float32
    _attention_step_kernel[(num_kv_heads, min(spans, triton.cdiv(capacity, SPAN)))](
        q=q,
        k=k,
        v=v,
        keys=keys,
        values=values,
        position=position,
        rotation=rotation,
        sums=sums,
        peaks=peaks,
        totals=totals,
        arrivals=_arrivals(q.device, num_kv_heads),
        out=out,
        scale_log2=scale * math.log2(math.e),
        D=dim,
        GROUP=group,
        Q_NORM=0 if rotation.q_norm is None else rotation.q_norm.numel(),
        K_NORM=0 if rotation.k_norm is None else rotation.k_norm.numel(),
        SPAN=SPAN,
        SPANS=spans,
        TILE=32 if wide else min(TILE, 2**13 // block_half),
        BLOCK_G=max(triton.next_power_of_2(group), 16),
        BLOCK_HALF=block_half,
        OPERAND=operand_dtype(q.dtype),
        num_warps=NUM_WARPS,
        num_stages=1,  # the loop reads ahead by itself
        enable_fp_fusion=True,
        **pdl_options(q.device),
    )
    return out
