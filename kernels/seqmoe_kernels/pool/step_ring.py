"""What a step tells the host: its token and the pool's counters, in a ring, and how long it took.

The ring lies in host memory that the GPU can write. Each 64-bit word carries its entry's number in
its low bits, so a reader sees for every word by itself whether it has arrived, in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check, check_pinned
from seqmoe_kernels.common.clock import add_span_reference, now_ns, now_ns_reference
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.state import (
    GAP_NS,
    NUM_COUNTERS,
    NUM_MARKS,
    RULE_NOW,
    RULE_TICK,
    STEP_BEGAN,
    STEP_ENDED,
    STEP_NS,
    PoolState,
)

ENTRY_WORDS = 1 + NUM_COUNTERS  # the token first
NUMBER_BITS = 16
LOW_BITS = (1 << NUMBER_BITS) - 1
VALUE_BITS = 64 - NUMBER_BITS - 1

_BLOCK = tl.constexpr(triton.next_power_of_2(ENTRY_WORDS))
_ENTRY_WORDS, _NUMBER_BITS, _LOW_BITS = map(tl.constexpr, (ENTRY_WORDS, NUMBER_BITS, LOW_BITS))
_LARGEST = tl.constexpr((1 << VALUE_BITS) - 1)
_GAP_NS, _STEP_NS = map(tl.constexpr, (GAP_NS, STEP_NS))
_RULE_TICK, _RULE_NOW = map(tl.constexpr, (RULE_TICK, RULE_NOW))
_STEP_BEGAN, _STEP_ENDED = map(tl.constexpr, (STEP_BEGAN, STEP_ENDED))


def begin_step_reference(pool: PoolState) -> None:
    counters, marks, rule = pool.counters, pool.marks, pool.rule
    now = now_ns_reference()
    rule[RULE_NOW] += rule[RULE_TICK]
    add_span_reference(counters[GAP_NS : GAP_NS + 1], marks[STEP_ENDED], now)
    marks[STEP_BEGAN] = now


@triton.jit
def _begin_step_kernel(counters, marks, rule):
    now, ended = now_ns(), tl.load(marks + _STEP_ENDED)
    use_now = tl.load(rule + _RULE_NOW) + tl.load(rule + _RULE_TICK)
    gap = tl.load(counters + _GAP_NS) + tl.where(ended > 0, now - ended, 0)
    tl.debug_barrier()
    tl.store(rule + _RULE_NOW, use_now)
    tl.store(counters + _GAP_NS, gap)
    tl.store(marks + _STEP_BEGAN, now)


def check_clock(counters: torch.Tensor, marks: torch.Tensor) -> None:
    check("counters", counters, torch.int64, (NUM_COUNTERS,), counters.device)
    check("marks", marks, torch.int64, (NUM_MARKS,), counters.device)


@verb(begin_step_reference)
def begin_step(pool: PoolState) -> None:
    """Note that a step begins: what passed since the end of the last one goes into GAP_NS, and
    RULE_NOW goes on by RULE_TICK."""
    check_clock(pool.counters, pool.marks)
    check("rule", pool.rule, torch.int64, (2,), pool.counters.device)
    _begin_step_kernel[(1,)](
        counters=pool.counters,
        marks=pool.marks,
        rule=pool.rule,
        num_warps=1,
        enable_fp_fusion=True,
    )


def publish_reference(
    token: torch.Tensor, pool: PoolState, ring: torch.Tensor, number: torch.Tensor
) -> None:
    counters, marks = pool.counters, pool.marks
    now = now_ns_reference()
    add_span_reference(counters[STEP_NS : STEP_NS + 1], marks[STEP_BEGAN], now)
    marks[STEP_BEGAN], marks[STEP_ENDED] = 0, now
    values = torch.cat((token, counters)) & ((1 << VALUE_BITS) - 1)
    ring[int(number) % len(ring)] = values << NUMBER_BITS | (number & LOW_BITS)
    number += 1


@triton.jit
def _publish_kernel(token, counters, marks, ring, number, SIZE: tl.constexpr):
    i = tl.arange(0, _BLOCK)
    n, now, began = tl.load(number), now_ns(), tl.load(marks + _STEP_BEGAN)
    value = tl.load(counters + i - 1, mask=(i > 0) & (i < _ENTRY_WORDS), other=0)
    value += tl.where((i == _STEP_NS + 1) & (began > 0), now - began, 0)
    value = tl.where(i == 0, tl.load(token), value)
    tl.debug_barrier()  # all threads have read what one of them writes now
    tl.store(counters + i - 1, value, mask=i == _STEP_NS + 1)
    tl.store(marks + _STEP_BEGAN, tl.full((), 0, tl.int64))
    tl.store(marks + _STEP_ENDED, now)
    word = ((value & _LARGEST) << _NUMBER_BITS) | (n & _LOW_BITS)
    tl.store(ring + n % SIZE * _ENTRY_WORDS + i, word, mask=i < _ENTRY_WORDS)
    tl.store(number, n + 1)


@verb(publish_reference)
def publish(token: torch.Tensor, pool: PoolState, ring: torch.Tensor, number: torch.Tensor) -> None:
    """End a step: write `token` (i64 [1]) and the pool's counters into entry `number` (i64 [1],
    counted up here) of `ring` (i64 [R, 17], on the host, pinned when the rest is on a GPU), modulo
    R. What passed since `begin_step` goes into STEP_NS before.

    A word is its value << 16 | the low 16 bits of the number. Values are taken modulo 2^47: counts
    never get there, sums of nanoseconds do in 39 hours, and their differences remain right.
    """
    check("token", token, torch.int64, (1,), token.device)
    check_clock(pool.counters, pool.marks)
    check("ring", ring, torch.int64, (-1, ENTRY_WORDS), ring.device)
    check("number", number, torch.int64, (1,), token.device)
    check_pinned("ring", ring, token.device)
    _publish_kernel[(1,)](
        token=token,
        counters=pool.counters,
        marks=pool.marks,
        ring=ring,
        number=number,
        SIZE=len(ring),
        num_warps=1,
        enable_fp_fusion=True,
    )


def read_entry(ring: torch.Tensor, number: int) -> list[int] | None:
    """Entry `number` of a ring on the host: token and counters, None while it is not all there."""
    words = ring[number % len(ring)].tolist()
    if any((word ^ number) & LOW_BITS for word in words):
        return None
    return [word >> NUMBER_BITS for word in words]
