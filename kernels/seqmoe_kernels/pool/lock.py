"""The lock: a kernel beside those of a step takes turns with them in the pool's bookkeeping.

`choose` takes the lock before an event, and waits until no other kernel holds it; `fetch`, behind
the event, frees it. `schedule_prefetches` takes the free lock, asks for prefetches, and returns it
in the state "not free", so that it asks once behind each event. So the two never meet, neither
waits for a kernel that does not run, and an event that finds the lock unused has lost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check
from seqmoe_kernels.pool.fetch import Begun
from seqmoe_kernels.state import NUM_REQUESTS

COPY_PROGRAMS = 16  # of 16 KiB under way each fill the link; with 8 copies take longer
# A step that was broken off on the host never gets to its last layer, and the host may wait for all
# that runs before it goes on: kernels beside a step give up then.
LIMIT_NS = 10**8

FREE, HELD = 1, 2  # bits of the lock's word; HELD: by a kernel beside
LAYER_SHIFT = 2

_FREE, _HELD = tl.constexpr(FREE), tl.constexpr(HELD)
_LAYER_SHIFT = tl.constexpr(LAYER_SHIFT)


class Handover(NamedTuple):
    """What `choose` leaves for what runs beside, and what that keeps. D layers of look-ahead, E
    experts of a layer, L layers, K wanted."""

    lock: torch.Tensor  # int32 [1], layer << 2 | HELD | FREE
    logits: torch.Tensor  # f32 [D * E], of the routers of the next layers
    used: torch.Tensor  # int32 [L * K], flat ids wanted last
    slots: torch.Tensor  # int32 [K], where those of the last event are
    served: torch.Tensor  # int64 [COPY_PROGRAMS], the next request of each program
    arrived: torch.Tensor  # int32 [NUM_REQUESTS], programs that are done, and that were cut short

    @classmethod
    def idle(
        cls, num_layers: int, num_experts: int, top_k: int, distances: int, device: torch.device
    ) -> Handover:
        """Nothing was asked for yet."""

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            lock=zeros(1),
            logits=zeros(distances * num_experts, torch.float32),
            used=zeros(num_layers * top_k),
            slots=zeros(top_k),
            served=zeros(COPY_PROGRAMS, torch.int64),
            arrived=zeros(NUM_REQUESTS),
        )

    def free_behind(self, layer: int) -> Begun:
        """Frees the lock, as a signal of the `fetch` behind the event of `layer`."""
        return Begun(self.lock, layer << LAYER_SHIFT | FREE)


def take_lock_reference(handover: Handover) -> None:
    handover.lock.bitwise_and_(~FREE)


def layer_at_reference(handover: Handover) -> int:
    return int(handover.lock) >> LAYER_SHIFT


@triton.jit
def layer_at(word):
    """The layer of the last event."""
    return word >> _LAYER_SHIFT


@triton.jit
def take_lock(lock):
    """From here on no kernel beside holds the lock; what one has done under it is seen. Returns the
    word before. For kernels of one program."""
    before = tl.atomic_and(lock, ~_FREE, sem="acq_rel")
    word = before
    while (word & _HELD) != 0:
        word = tl.atomic_or(lock, 0, sem="acquire")
    return before


@triton.jit
def try_lock(lock, word):
    """Whether the kernel beside now holds the lock, which it has seen free in `word`."""
    return tl.atomic_cas(lock, word, word ^ (_FREE | _HELD), sem="acq_rel") == word


@triton.jit
def leave_lock(lock):
    """What was done under the lock is seen by the next event."""
    tl.debug_barrier()
    tl.atomic_and(lock, ~_HELD, sem="release")


def check_handover(handover: Handover, device: torch.device) -> None:
    sizes = {"lock": 1, "served": COPY_PROGRAMS, "arrived": NUM_REQUESTS}
    dtypes = {"served": torch.int64, "logits": torch.float32}
    for name, tensor in handover._asdict().items():
        check(name, tensor, dtypes.get(name, torch.int32), (sizes.get(name, -1),), device)
