"""The two structures that kernels receive beside tensors and ints."""

from __future__ import annotations

from typing import NamedTuple

import torch

EMPTY, FETCHING, READY = 0, 1, 2  # values of PoolState.state
HITS, MISSES, NO_VICTIM = 0, 1, 2  # indices into PoolState.counters


class ExpertFormat(NamedTuple):
    """Byte offsets of the parts of one expert record: gate [I, H], up [I, H], down [H, I].

    Scales are F32, one per 128x128 block, at the offsets `*_scale`; -1 when the weights are not
    `torch.float8_e4m3fn`. `stamp` is the offset of the record's I64 flat expert id.
    """

    weight_dtype: torch.dtype
    hidden: int
    inter: int
    gate: int
    up: int
    down: int
    gate_scale: int
    up_scale: int
    down_scale: int
    stamp: int
    record_bytes: int


class PoolState(NamedTuple):
    """The bookkeeping of the pool, all tensors on one device. S slots, N = layers * experts.

    A flat expert id is `layer * num_experts + expert`. Only READY slots are in `slot_of`.
    """

    slot_of: torch.Tensor  # int32 [N], slot or -1: the lookup table
    owner: torch.Tensor  # int32 [S], flat expert id or -1
    state: torch.Tensor  # int32 [S], EMPTY, FETCHING or READY
    assigned_tag: torch.Tensor  # int64 [S], counted up at each assignment
    landed_tag: torch.Tensor  # int64 [S], tag of the last record that landed
    score: torch.Tensor  # int64 [S], the victim is the smallest; LRU: clock of the last use
    clock: torch.Tensor  # int64 [1], counts resolve events
    counters: torch.Tensor  # int64 [3], HITS, MISSES, NO_VICTIM
