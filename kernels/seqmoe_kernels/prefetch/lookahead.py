"""Look-ahead: the routers of the next layers on the present state name experts, and what a layer
would have missed without prefetch judges what was named for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.eviction.expected_use import ExpectedUse
from seqmoe_kernels.pool.choose import RecordedIds
from seqmoe_kernels.pool.route import route_reference, sort_key
from seqmoe_kernels.state import CERTAIN, LEAST, NAMED, RIGHT, Flights

FEW_NAMES = 64  # say nothing of how many are right

_LEAST, _CERTAIN, _FEW_NAMES = map(tl.constexpr, (LEAST, CERTAIN, FEW_NAMES))
_NAMED, _RIGHT = tl.constexpr(NAMED), tl.constexpr(RIGHT)


class Asking(NamedTuple):
    """Who may be asked for: `num_names` of the `num_experts` that each router ahead likes best.
    With `recorded` (`ids` int32 [steps, L, D, n], -1 for none) those are the names instead.
    `hinted`: experts that `pick_candidates` has noted for the layers beyond may be asked for too.
    """

    num_experts: int
    num_names: int
    recorded: RecordedIds | None = None
    hinted: bool = False
    expected_use: ExpectedUse | None = None  # by which victims are chosen


class Ahead(NamedTuple):
    """What is known behind `layer`: its experts, flat ids `wanted` int32 [K] in `slots` int32 [K],
    and the `logits` [1, d * E] of the routers of the d next layers."""

    layer: int
    logits: torch.Tensor
    wanted: torch.Tensor
    slots: torch.Tensor
    asking: Asking


def judge_reference(ahead: Ahead, flights: Flights) -> None:
    wanted = ahead.wanted[flights.absent > 0].tolist()
    for d in range(min(flights.names.shape[1], ahead.layer)):
        names = [name for name in flights.names[ahead.layer, d].tolist() if name >= 0]
        right = len(set(names) & set(wanted))
        flights.accuracy[d] += torch.tensor([len(wanted), len(names), right])
    flights.names[ahead.layer].fill_(-1)


def worthy_reference(flights: Flights) -> list[bool]:
    """Whether enough of the names 1, 2, ... layers ahead have been right to be asked for."""
    least = int(flights.rules[LEAST])
    rows = flights.accuracy[:, [NAMED, RIGHT]].tolist()
    return [named < FEW_NAMES or right * CERTAIN >= named * least for named, right in rows]


def named_reference(ahead: Ahead, flights: Flights) -> list[list[int]]:
    """For each layer that is seen, the flat ids named, the likeliest first."""
    num_layers, distances, _ = flights.names.shape
    seen = min(distances, num_layers - 1 - ahead.layer)
    num_experts, num_names, recorded, _, _ = ahead.asking
    if recorded is not None:
        ids, step = recorded
        rows = ids[int(step) % len(ids), ahead.layer, :seen, :num_names]
    else:
        logits = ahead.logits.view(-1, num_experts)[:seen]
        rows = route_reference(logits, num_names, False)[0]
    return [
        [e + (ahead.layer + d) * num_experts if e >= 0 else -1 for e in row]
        for d, row in enumerate(rows.tolist(), 1)
    ]


@triton.jit
def named_experts(
    logits, ids, step, num_steps, layer, seen, E: tl.constexpr, NAMES: tl.constexpr,
    BLOCK_E: tl.constexpr, DISTANCES: tl.constexpr, BLOCK_N: tl.constexpr, RECORDED: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
):  # fmt: skip
    """Flat ids [DISTANCES * BLOCK_N] of what is named, -1 for nothing."""
    d = tl.arange(0, DISTANCES)
    rank = tl.arange(0, BLOCK_N)
    inside = (d < seen)[:, None] & (rank < NAMES)[None, :]
    if RECORDED:
        row = (tl.load(step) % num_steps * NUM_LAYERS + layer) * DISTANCES + d
        names = tl.load(ids + row[:, None] * NAMES + rank[None, :], mask=inside, other=-1)
    else:
        expert = tl.arange(0, BLOCK_E)[None, :]
        valid = (d < seen)[:, None] & (expert < E)
        logit = tl.load(logits + d[:, None] * E + expert, mask=valid, other=0.0).to(tl.float32)
        lowest: tl.constexpr = -(2**63)
        key = tl.where(valid, sort_key(logit, expert, E), lowest)
        names = tl.full((DISTANCES, BLOCK_N), -1, tl.int32)
        for k in tl.static_range(NAMES):
            best = E - 1 - (tl.max(key, 1) & 0x7FFFFFFF).to(tl.int32)
            names = tl.where((rank == k)[None, :], best[:, None], names)
            key = tl.where(expert == best[:, None], lowest, key)
    flat = tl.where(inside & (names >= 0), names + ((layer + 1 + d) * E)[:, None], -1)
    return tl.reshape(flat, (DISTANCES * BLOCK_N,))


@triton.jit
def worthy_distances(flights, DISTANCES: tl.constexpr):
    """For each distance whether enough of the names have been right to be asked for."""
    row = tl.arange(0, DISTANCES) * 3
    named, right = (
        tl.load(flights.accuracy + row + _NAMED),
        tl.load(flights.accuracy + row + _RIGHT),
    )
    least = tl.load(flights.rules + _LEAST)
    return (named < _FEW_NAMES) | (right * _CERTAIN >= named * least)


@triton.jit
def judge_names(
    wanted, flights, layer, K: tl.constexpr, BLOCK_K: tl.constexpr, DISTANCES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compare what was named for this layer with what it wanted and would have missed."""
    k, d = tl.arange(0, BLOCK_K), tl.arange(0, DISTANCES)
    absent = tl.load(flights.absent + k, mask=k < K, other=0) > 0
    chosen = tl.load(wanted + k, mask=k < K, other=-2)
    at = layer * DISTANCES * BLOCK_N + tl.arange(0, DISTANCES * BLOCK_N)
    name = tl.load(flights.names + at)
    right = tl.max((absent[None, :] & (name[:, None] == chosen[None, :])).to(tl.int64), 1)
    num_right = tl.sum(tl.reshape(right, (DISTANCES, BLOCK_N)), 1)
    num_named = tl.sum(tl.reshape((name >= 0).to(tl.int64), (DISTANCES, BLOCK_N)), 1)
    num_missing = tl.sum(absent.to(tl.int64), 0) * (d < layer)
    missing = tl.load(flights.accuracy + d * 3)
    named, hit = tl.load(flights.accuracy + d * 3 + 1), tl.load(flights.accuracy + d * 3 + 2)
    tl.debug_barrier()
    tl.store(flights.accuracy + d * 3, missing + num_missing)
    tl.store(flights.accuracy + d * 3 + 1, named + num_named)
    tl.store(flights.accuracy + d * 3 + 2, hit + num_right)
    tl.store(flights.names + at, tl.full((DISTANCES * BLOCK_N,), -1, tl.int32))
