"""The gate: kernels beside those of a step take turns with them in the pool's bookkeeping.

`choose` closes it before an event, and waits until nobody is inside; `fetch`, behind the event,
opens it. `schedule_prefetches` goes in through the open gate, asks for prefetches, and leaves it
closed. So they never meet, none waits for one that does not run, and an event that finds
nobody inside has lost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check
from seqmoe_kernels.state import NUM_REQUESTS

COPY_PROGRAMS = 16  # of 16 KiB under way each fill the link; with 8 copies take longer

OPEN, INSIDE = 1, 2  # bits of the gate
LAYER_SHIFT = 2

_OPEN, _INSIDE = tl.constexpr(OPEN), tl.constexpr(INSIDE)
_LAYER_SHIFT = tl.constexpr(LAYER_SHIFT)


class Handover(NamedTuple):
    """What `choose` leaves for the kernels beside, and what they keep. D layers of look-ahead, E
    experts of a layer, L layers, K wanted."""

    lock: torch.Tensor  # int32 [1], layer << 2 | INSIDE | OPEN
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


def free_lock_reference(handover: Handover, layer: int) -> None:
    handover.lock.fill_(layer << LAYER_SHIFT | OPEN)


def take_lock_reference(handover: Handover) -> None:
    handover.lock.bitwise_and_(~OPEN)


def layer_at_reference(handover: Handover) -> int:
    return int(handover.lock) >> LAYER_SHIFT


@triton.jit
def layer_at(gate):
    """The layer of the last event."""
    return gate >> _LAYER_SHIFT


@triton.jit
def take_lock(gate):
    """From here on nobody is inside; what was done there is seen. Returns how the gate was. For
    kernels of one program."""
    before = tl.atomic_and(gate, ~_OPEN, sem="acq_rel")
    state = before
    while (state & _INSIDE) != 0:
        state = tl.atomic_or(gate, 0, sem="acquire")
    return before


@triton.jit
def free_lock(gate, layer):
    """What kernels before this one have done is seen inside: they have ended, so that nothing has
    to be released."""
    tl.atomic_xchg(gate, (layer << _LAYER_SHIFT) | _OPEN, sem="relaxed")


@triton.jit
def try_lock(gate, state):
    """Whether the program is inside; `state` is how it has seen the gate, open."""
    return tl.atomic_cas(gate, state, state ^ (_OPEN | _INSIDE), sem="acq_rel") == state


@triton.jit
def leave_lock(gate):
    """What was done inside is seen by the next event."""
    tl.debug_barrier()
    tl.atomic_and(gate, ~_INSIDE, sem="release")


def check_handover(handover: Handover, device: torch.device) -> None:
    sizes = {"lock": 1, "served": COPY_PROGRAMS, "arrived": NUM_REQUESTS}
    dtypes = {"served": torch.int64, "logits": torch.float32}
    for name, tensor in handover._asdict().items():
        check(name, tensor, dtypes.get(name, torch.int32), (sizes.get(name, -1),), device)
