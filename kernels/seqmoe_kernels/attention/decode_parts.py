"""Parts of the attention kernel: heads in halves, tiles of the KV state, and merging spans.

A head comes in two halves, because a rotation pairs dimension i with i + D/2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seqmoe_kernels.dense.norm import inverse_rms, normalized


@triton.jit
def halves(x, at, mask, D: tl.constexpr):
    """Dimensions i and i + D/2 of heads, `at` those of the first half."""
    return tl.load(x + at, mask=mask, other=0), tl.load(x + at + D // 2, mask=mask, other=0)


@triton.jit
def gains(weight, at, i, mask, D: tl.constexpr, NORM: tl.constexpr):
    """The weights of a norm over NORM dimensions for heads `at`: of each head when NORM is D, ones
    when it is 0."""
    if NORM == 0:
        ones = tl.full((at.shape[0], i.shape[0]), 1.0, tl.float32)
        return ones, ones
    else:
        first, second = halves(weight, at * (0 if NORM == D else 1) + i[None, :], mask, D)
        return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def norm_factor(x, heads, eps, D: tl.constexpr, NORM: tl.constexpr):
    """1 over the root mean square of each of the heads, or of the whole row `x` they are from."""
    if NORM == 0:
        return 1.0
    elif NORM == D:
        squares = dot_halves(heads, heads)
        return tl.rsqrt(squares / D + eps)[:, None]
    else:
        return inverse_rms(x, eps, NORM, triton.next_power_of_2(NORM))


@triton.jit
def rotated(heads, factor, gain, cos, sin):
    """Heads normalised and rotated, rounded where `rms_norm` and `rotary` round."""
    dtype: tl.constexpr = heads[0].dtype
    first = normalized(heads[0].to(tl.float32), gain[0], factor, dtype).to(tl.float32)
    second = normalized(heads[1].to(tl.float32), gain[1], factor, dtype).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def dot_halves(a, b):
    """Row by row, the product of heads [G, D] summed over D."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    return total + tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)


@triton.jit
def tile(keys, values, row, end, i, d, kv_head, num_kv_heads, D: tl.constexpr):
    """The halves of the keys, and the values, at the positions `row` before `end`."""
    inside = (row < end)[:, None]
    at = (row[:, None].to(tl.int64) * num_kv_heads + kv_head) * D
    # Past the L1 cache: the kernel that wrote the last of these may have run on another SM.
    half = inside & (i < D // 2)[None, :]
    first = tl.load(keys + at + i[None, :], mask=half, other=0, cache_modifier=".cg")
    second = tl.load(keys + at + D // 2 + i[None, :], mask=half, other=0, cache_modifier=".cg")
    whole = inside & (d < D)[None, :]
    value = tl.load(values + at + d[None, :], mask=whole, other=0, cache_modifier=".cg")
    return first, second, value


@triton.jit
def put(keys, values, key, value, here, g, i, d, kv_head, num_kv_heads, D: tl.constexpr):
    """Store the first row of the key's halves, and the value, at the position `here`."""
    at = (here.to(tl.int64) * num_kv_heads + kv_head) * D
    first = keys + at + i[None, :] + 0 * g[:, None]
    once = (g == 0)[:, None] & (i < D // 2)[None, :]
    tl.store(first, key[0], mask=once)
    tl.store(first + D // 2, key[1], mask=once)
    tl.store(values + at + d, value, mask=d < D)


@triton.jit
def attend(query, state, seen, scale_log2, peak, total, mixed):
    """Take the `seen` positions of a tile into the softmax: its peak, the sum of its weights below
    the peak, and the values mixed with them."""
    operand: tl.constexpr = query[0].dtype
    score = tl.dot(query[0], tl.trans(state[0].to(operand)), input_precision="ieee")
    score = tl.dot(query[1], tl.trans(state[1].to(operand)), score, input_precision="ieee")
    score = tl.where(seen, score * scale_log2, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1))
    weight = tl.exp2(score - new_peak[:, None])
    fade = tl.exp2(peak - new_peak)
    value = state[2].to(operand)
    mixed = tl.dot(weight.to(operand), value, mixed * fade[:, None], input_precision="ieee")
    return new_peak, total * fade + tl.sum(weight, 1), mixed


@triton.jit
def merge(
    sums,
    peaks,
    totals,
    out,
    kv_head,
    count,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Weigh the `count` spans of one KV head against each other and write its group's heads."""
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUP)
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    span, g, d = tl.arange(0, SPANS), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    # All heads in one row, so that a thread has the same element of every span. All loads pass by
    # the L1 cache: other programs have just written this.
    column = tl.arange(0, BLOCK_G * BLOCK_D)
    at = column // BLOCK_D * (SPANS * D) + column % BLOCK_D
    inside = (column < GROUP * BLOCK_D) & (column % BLOCK_D < D)
    mixed = tl.load(
        sums + kv_head * (GROUP * SPANS * D) + span[:, None] * D + at[None, :],
        mask=(span < count)[:, None] & inside[None, :],
        other=0,
        cache_modifier=".cg",
    )
    part = (kv_head * GROUP + tl.minimum(g, GROUP - 1))[None, :] * SPANS + span[:, None]
    seen = (span < count)[:, None]
    peak = tl.load(peaks + part, mask=seen, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(totals + part, mask=seen, other=0, cache_modifier=".cg")
    weight = tl.exp2(peak - tl.max(peak, 0)[None, :])
    mixed = tl.reshape(mixed, (SPANS, BLOCK_G, BLOCK_D)) * weight[:, :, None]
    mean = tl.sum(mixed, 0) / tl.sum(total * weight, 0)[:, None]
    whole = (g < GROUP)[:, None] & (d < D)[None, :]
    target = out + (kv_head * GROUP + g)[:, None] * D + d[None, :]
    tl.store(target, mean.to(out.dtype.element_ty), mask=whole)
