"""Attention of one query token over the KV state.

The positions are split into spans of a fixed length, one program per span and KV head, so that a
long context keeps the whole GPU busy; a second kernel merges the spans in order. The grid covers
the capacity, and a program whose span lies past the current length returns at once: the host never
needs to know the length.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from seqmoe_kernels.checks import FLOATS, check, check_kernel_device

SPAN = 128  # positions per program; fixed, so that results do not depend on the capacity
MAX_HEAD_DIM = 256


def attention_decode_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    count = int(length)
    num_heads, dim = q.shape
    heads = q.float().view(keys.shape[1], -1, dim)  # [m, n / m, D]
    scores = heads @ keys[:count].float().permute(1, 2, 0) * scale  # [m, n / m, count]
    mixed: torch.Tensor = scores.softmax(-1) @ values[:count].float().transpose(0, 1)
    return mixed.view(num_heads, dim).to(q.dtype)


@triton.jit
def _span_kernel(
    q,
    keys,
    values,
    length,
    sums,
    peaks,
    totals,
    scale_log2,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head, num_kv_heads = tl.program_id(0), tl.num_programs(0)
    span, num_spans = tl.program_id(1), tl.num_programs(1)
    count = tl.load(length).to(tl.int32)
    first = span * SPAN
    if first >= count:
        return
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    rows = (g < GROUP)[:, None] & (d < D)[None, :]
    query = tl.load(q + head[:, None] * D + d[None, :], mask=rows, other=0).to(tl.float32)
    peak = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    mixed = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for start in range(first, tl.minimum(first + SPAN, count), TILE):
        position = start + tl.arange(0, TILE)
        inside = (position < count)[:, None] & (d < D)[None, :]
        at = (position[:, None].to(tl.int64) * num_kv_heads + kv_head) * D + d[None, :]
        key = tl.load(keys + at, mask=inside, other=0).to(tl.float32)
        value = tl.load(values + at, mask=inside, other=0).to(tl.float32)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
        score = tl.where((position < count)[None, :], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None] + tl.dot(weight, value, input_precision=PRECISION)
        peak = new_peak
    part = head * num_spans + span
    tl.store(peaks + part, peak, mask=g < GROUP)
    tl.store(totals + part, total, mask=g < GROUP)
    tl.store(sums + part[:, None].to(tl.int64) * D + d[None, :], mixed, mask=rows)


@triton.jit
def _merge_kernel(
    length,
    sums,
    peaks,
    totals,
    out,
    capacity_spans,
    D: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    num_spans = tl.cdiv(tl.load(length).to(tl.int32), SPAN)
    peak = float("-inf")
    total = 0.0
    mixed = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, num_spans, TILE):
        span = start + tl.arange(0, TILE)
        inside = span < num_spans
        part = head * capacity_spans + span
        part_peak = tl.load(peaks + part, mask=inside, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(part_peak, 0))
        weight = tl.exp2(part_peak - new_peak)
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(tl.load(totals + part, mask=inside, other=0) * weight, 0)
        part_sum = tl.load(
            sums + part[:, None].to(tl.int64) * D + d[None, :],
            mask=inside[:, None] & (d < D)[None, :],
            other=0,
        )
        mixed = mixed * fade + tl.sum(part_sum * weight[:, None], 0)
        peak = new_peak
    tl.store(out + head * D + d, (mixed / total).to(out.dtype.element_ty), mask=d < D)


def check_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor
) -> None:
    check("q", q, FLOATS, (-1, -1), q.device)
    num_heads, dim = q.shape
    check("keys", keys, q.dtype, (-1, -1, dim), q.device)
    capacity, num_kv_heads = keys.shape[:2]
    check("values", values, q.dtype, (capacity, num_kv_heads, dim), q.device)
    check("length", length, (torch.int32, torch.int64), (1,), q.device)
    if num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, expected a multiple of {num_kv_heads} KV heads")
    if dim > MAX_HEAD_DIM:
        raise ValueError(f"q has head dimension {dim}, expected at most {MAX_HEAD_DIM}")


def attention_decode_triton(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    check_kernel_device(q)
    check_attention(q, keys, values, length)
    (num_heads, dim), (capacity, num_kv_heads) = q.shape, keys.shape[:2]
    num_spans = triton.cdiv(capacity, SPAN)
    parts = torch.empty((num_heads, num_spans, dim + 2), dtype=torch.float32, device=q.device)
    sums, peaks, totals = parts.view(-1).split(
        [num_heads * num_spans * dim, num_heads * num_spans, num_heads * num_spans]
    )
    block_d = max(triton.next_power_of_2(dim), 16)
    group = num_heads // num_kv_heads
    wide = q.dtype == torch.float32
    out = torch.empty_like(q)
    _span_kernel[(num_kv_heads, num_spans)](
        q,
        keys,
        values,
        length,
        sums,
        peaks,
        totals,
        scale * math.log2(math.e),
        dim,
        group,
        SPAN,
        16 if wide else max(16, min(64, 4096 // block_d)),
        max(triton.next_power_of_2(group), 16),
        block_d,
        # 16-bit values are exact in TF32, so only the softmax weights are rounded, to 11 bits.
        "ieee" if wide else "tf32",
        num_warps=4,
        enable_fp_fusion=True,
    )
    _merge_kernel[(num_heads,)](
        length,
        sums,
        peaks,
        totals,
        out,
        num_spans,
        dim,
        SPAN,
        16,
        block_d,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


def attention_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend with one token's heads `q` [n, D] over the first `length` (int32 or int64 [1], on the
    same device, at least 1) positions of `keys` and `values` [C, m, D].

    Query head i reads KV head i // (n / m). Scores, softmax and sums are f32; the result [n, D] has
    the dtype of `q` and does not depend on the capacity C.
    """
    run = attention_decode_triton if q.is_cuda else attention_decode_reference
    return run(q, keys, values, length, scale)
