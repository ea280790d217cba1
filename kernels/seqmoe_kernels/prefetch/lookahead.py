"""Look-ahead: the routers of the next layers, on the present state, predict experts. What a layer
would have missed without prefetch tells how many predictions for it were right."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.pool.choose import RecordedIds
from seqmoe_kernels.pool.route import route_reference, sort_key
from seqmoe_kernels.state import CERTAIN, LEAST, PREDICTED, RIGHT, Flights

FEW_PREDICTIONS = 64  # say nothing of how many are right

_LEAST, _CERTAIN, _FEW = map(tl.constexpr, (LEAST, CERTAIN, FEW_PREDICTIONS))
_PREDICTED, _RIGHT = tl.constexpr(PREDICTED), tl.constexpr(RIGHT)


class Predictions(NamedTuple):
    """Where predictions come from: the `per_layer` best of the `num_experts` of each router ahead,
    or in their place `recorded` ones (`ids` int32 [steps, L, D, per_layer], -1 for none). With
    `use_candidates` those of `pick_candidates` stand behind them, for the layers beyond."""

    num_experts: int
    per_layer: int
    recorded: RecordedIds | None = None
    use_candidates: bool = False


def count_right_reference(layer: int, wanted: torch.Tensor, flights: Flights) -> None:
    missing = wanted[flights.absent > 0].tolist()
    for d in range(min(flights.predicted.shape[1], layer)):
        predicted = [expert for expert in flights.predicted[layer, d].tolist() if expert >= 0]
        right = len(set(predicted) & set(missing))
        flights.accuracy[d] += torch.tensor([len(missing), len(predicted), right])
    flights.predicted[layer].fill_(-1)


def precise_enough_reference(flights: Flights) -> list[bool]:
    """Whether enough of the predictions 1, 2, ... layers ahead have been right to copy for them."""
    least = int(flights.rules[LEAST])
    rows = flights.accuracy[:, [PREDICTED, RIGHT]].tolist()
    return [num < FEW_PREDICTIONS or right * CERTAIN >= num * least for num, right in rows]


def predicted_reference(
    predictions: Predictions, layer: int, logits: torch.Tensor, flights: Flights
) -> list[list[int]]:
    """For each layer that is seen behind `layer`, the flat ids predicted, the likeliest first;
    `logits` f32 [D * E]."""
    num_layers, distances, _ = flights.predicted.shape
    seen = min(distances, num_layers - 1 - layer)
    num_experts, per_layer, recorded, _ = predictions
    if recorded is not None:
        ids, step = recorded
        rows = ids[int(step) % len(ids), layer, :seen, :per_layer]
    else:
        rows = route_reference(logits.view(-1, num_experts)[:seen], per_layer, False)[0]
    return [
        [e + (layer + d) * num_experts if e >= 0 else -1 for e in row]
        for d, row in enumerate(rows.tolist(), 1)
    ]


@triton.jit
def predicted_experts(
    logits, recorded, num_recorded, layer, seen, E: tl.constexpr, N: tl.constexpr,
    NUM_LAYERS: tl.constexpr, DISTANCES: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Flat ids [DISTANCES * BLOCK_N] of what is predicted, N for each layer, -1 for nothing."""
    d = tl.arange(0, DISTANCES)
    rank = tl.arange(0, BLOCK_N)
    inside = (d < seen)[:, None] & (rank < N)[None, :]
    if recorded is not None:
        row = (tl.load(recorded.step) % num_recorded * NUM_LAYERS + layer) * DISTANCES + d
        ids = tl.load(recorded.ids + row[:, None] * N + rank[None, :], mask=inside, other=-1)
    else:
        expert = tl.arange(0, BLOCK_E)[None, :]
        valid = (d < seen)[:, None] & (expert < E)
        logit = tl.load(logits + d[:, None] * E + expert, mask=valid, other=0.0).to(tl.float32)
        lowest: tl.constexpr = -(2**63)
        key = tl.where(valid, sort_key(logit, expert, E), lowest)
        ids = tl.full((DISTANCES, BLOCK_N), -1, tl.int32)
        for k in tl.static_range(N):
            best = E - 1 - (tl.max(key, 1) & 0x7FFFFFFF).to(tl.int32)
            ids = tl.where((rank == k)[None, :], best[:, None], ids)
            key = tl.where(expert == best[:, None], lowest, key)
    flat = tl.where(inside & (ids >= 0), ids + ((layer + 1 + d) * E)[:, None], -1)
    return tl.reshape(flat, (DISTANCES * BLOCK_N,))


@triton.jit
def precise_enough(flights, DISTANCES: tl.constexpr):
    """For each distance whether enough of the predictions have been right to copy for them."""
    row = tl.arange(0, DISTANCES) * 3
    predicted = tl.load(flights.accuracy + row + _PREDICTED)
    right = tl.load(flights.accuracy + row + _RIGHT)
    least = tl.load(flights.rules + _LEAST)
    return (predicted < _FEW) | (right * _CERTAIN >= predicted * least)


@triton.jit
def count_right(
    wanted, flights, layer, K: tl.constexpr, BLOCK_K: tl.constexpr, DISTANCES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compare what was predicted for this layer with what it wanted and would have missed."""
    k, d = tl.arange(0, BLOCK_K), tl.arange(0, DISTANCES)
    absent = tl.load(flights.absent + k, mask=k < K, other=0) > 0
    chosen = tl.load(wanted + k, mask=k < K, other=-2)
    at = layer * DISTANCES * BLOCK_N + tl.arange(0, DISTANCES * BLOCK_N)
    expert = tl.load(flights.predicted + at)
    right = tl.max((absent[None, :] & (expert[:, None] == chosen[None, :])).to(tl.int64), 1)
    num_right = tl.sum(tl.reshape(right, (DISTANCES, BLOCK_N)), 1)
    num_predicted = tl.sum(tl.reshape((expert >= 0).to(tl.int64), (DISTANCES, BLOCK_N)), 1)
    num_missing = tl.sum(absent.to(tl.int64), 0) * (d < layer)
    row = flights.accuracy + d * 3
    missing, predicted, hit = tl.load(row), tl.load(row + _PREDICTED), tl.load(row + _RIGHT)
    tl.debug_barrier()
    tl.store(row, missing + num_missing)
    tl.store(row + _PREDICTED, predicted + num_predicted)
    tl.store(row + _RIGHT, hit + num_right)
    tl.store(flights.predicted + at, tl.full((DISTANCES * BLOCK_N,), -1, tl.int32))
