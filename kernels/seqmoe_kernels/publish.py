"""The token ring: where a step leaves its token and the pool's counters for the host.

The ring lies in host memory that the GPU can write. Each 64-bit word carries its entry's number in
its low bits, so a reader sees for every word by itself whether it has arrived, in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.checks import check, check_kernel_device

ENTRY_WORDS = 4  # token, then the pool's three counters
NUMBER_BITS = 16
LOW_BITS = (1 << NUMBER_BITS) - 1

_ENTRY_WORDS, _NUMBER_BITS, _LOW_BITS = map(tl.constexpr, (ENTRY_WORDS, NUMBER_BITS, LOW_BITS))


def publish_reference(
    token: torch.Tensor, counters: torch.Tensor, ring: torch.Tensor, number: torch.Tensor
) -> None:
    words = torch.cat((token, counters)) << NUMBER_BITS
    ring[int(number) % len(ring)] = words | (number & LOW_BITS)
    number += 1


@triton.jit
def _publish_kernel(token, counters, ring, number, SIZE: tl.constexpr):
    i = tl.arange(0, _ENTRY_WORDS)
    n = tl.load(number)
    value = tl.load(counters + i - 1, mask=i > 0, other=0)
    value = tl.where(i == 0, tl.load(token), value)
    tl.debug_barrier()  # all threads have read the number before one counts it up
    word = (value << _NUMBER_BITS) | (n & _LOW_BITS)
    tl.store(ring + n % SIZE * _ENTRY_WORDS + i, word)
    tl.store(number, n + 1)


def publish_triton(
    token: torch.Tensor, counters: torch.Tensor, ring: torch.Tensor, number: torch.Tensor
) -> None:
    check_kernel_device(token)
    check("token", token, torch.int64, (1,), token.device)
    check("counters", counters, torch.int64, (ENTRY_WORDS - 1,), token.device)
    check("ring", ring, torch.int64, (-1, ENTRY_WORDS), ring.device)
    check("number", number, torch.int64, (1,), token.device)
    if token.is_cuda and not ring.is_cuda and not ring.is_pinned():
        raise ValueError("ring is in pageable memory, expected pinned memory")
    _publish_kernel[(1,)](
        token, counters, ring, number, len(ring), num_warps=1, enable_fp_fusion=True
    )


def publish(
    token: torch.Tensor, counters: torch.Tensor, ring: torch.Tensor, number: torch.Tensor
) -> None:
    """Write `token` (i64 [1]) and `counters` (i64 [3]) into entry `number` (i64 [1], counted up
    here) of `ring` (i64 [R, 4], on the host, pinned when the rest is on a GPU), modulo R.

    A word is its value << 16 | the low 16 bits of the number; values are from 0 to 2^47 - 1.
    """
    run = publish_triton if token.is_cuda else publish_reference
    run(token, counters, ring, number)


def read_entry(ring: torch.Tensor, number: int) -> list[int] | None:
    """Entry `number` of a ring on the host: token and counters, None while it is not all there."""
    words = ring[number % len(ring)].tolist()
    if any((word ^ number) & LOW_BITS for word in words):
        return None
    return [word >> NUMBER_BITS for word in words]
