"""Choosing the next token from its logits, with all settings read from the device.

Tokens stand in the order of their distances (`integer_probs`), the lower id first; every filter
keeps the first ones, and the draw counts along the ids.
"""

from __future__ import annotations

import math

import torch

from seqmoe_kernels.common.verb import Verb
from seqmoe_kernels.sampling.integer_probs import NO_MASS, UNIT, distances, masses, random_share
from seqmoe_kernels.sampling.kernels import launch_sampling
from seqmoe_kernels.sampling.state import MIN_P, REPEAT, TEMPERATURE, TOP_K, SamplingState


def _penalised(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    repeat, presence, frequency = state.settings[REPEAT:].unbind()
    scaled = torch.where(logits > 0, logits / repeat, logits * repeat)
    logits = torch.where(state.seen, scaled, logits)
    return logits - frequency * state.counts - presence * (state.counts > 0)


def _cut(mass: torch.Tensor, distance: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """`mass` without that of the tokens that top-k and top-p drop."""
    order = distance.sort(stable=True).indices[: top_k or None]
    ordered = mass[order]
    before = ordered.cumsum(0) - ordered
    wanted = max(math.ceil(top_p * int(ordered.sum())), 1)  # the token that crosses it is kept
    return torch.zeros_like(mass).index_copy_(0, order, ordered.masked_fill(before >= wanted, 0))


def _drawn(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """A token by its probability, after temperature, top-k, top-p and min-p."""
    top_k, top_p, min_p = state.settings[TOP_K : MIN_P + 1].tolist()
    distance = distances(logits, state.settings[TEMPERATURE])
    farthest: torch.Tensor | int = NO_MASS - 1
    if 0 < top_k < len(distance):
        farthest = distance.topk(int(top_k), largest=False).values.max().clamp(max=farthest)
    ids = (distance <= farthest).nonzero().flatten()  # few, so that sorting costs little
    distance = distance[ids]
    mass = masses(distance)
    if top_k > 0 or top_p < 1:
        mass = _cut(mass, distance, int(top_k), top_p)
    end = mass.masked_fill(mass < math.ceil(min_p * UNIT), 0).cumsum(0)
    spot = (random_share(state.stream) * end[-1]).long()
    return ids[torch.searchsorted(end, spot, right=True)]


def sample_reference(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    logits = _penalised(logits.float(), state)
    greedy = float(state.settings[0]) == 0
    token = logits.argmax(0, True) if greedy else _drawn(logits, state)
    state.counts[token] += 1
    state.seen[token] = True
    state.stream[1] += 1
    return token


sample = Verb(launch_sampling, sample_reference)
