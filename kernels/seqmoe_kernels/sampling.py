"""Choosing the next token from its logits, with all settings read from the device.

Probabilities become integer masses, in units of 2^-32 of the largest one: sums of integers have one
value in any order, and a draw is one random integer below the total.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NUM_SETTINGS = 7
_UNIT = 2.0**32
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # constants of SplitMix64, as signed numbers
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class SamplingState(NamedTuple):
    """One answer's settings and memory, all tensors on one device. V tokens in the vocabulary.

    `settings`: temperature (0: greedy), top_k (0: off), top_p, min_p, repeat, presence and
    frequency penalty.
    """

    settings: torch.Tensor  # f32 [7]
    stream: torch.Tensor  # int64 [2]: seed, number of draws so far
    counts: torch.Tensor  # f32 [V]: how often a token is in the answer
    seen: torch.Tensor  # bool [V]: whether a token is in the prompt or the answer


def random_share(stream: torch.Tensor) -> torch.Tensor:
    """f64 [1], at least 0 and below 1, of 53 bits: SplitMix64 of the seed, at the number of the
    draw."""

    def xor_shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
        return z ^ ((z >> bits) & ((1 << (64 - bits)) - 1))

    z = stream[:1] + (stream[1:] + 1) * _GOLDEN
    z = xor_shifted(z, 30) * _MIX_1
    z = xor_shifted(z, 27) * _MIX_2
    bits = (xor_shifted(z, 31) >> 11) & (2**53 - 1)
    return bits.double() / 2**53


def _penalised(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    repeat, presence, frequency = state.settings[4:].unbind()
    scaled = torch.where(logits > 0, logits / repeat, logits * repeat)
    logits = torch.where(state.seen, scaled, logits)
    return logits - frequency * state.counts - presence * (state.counts > 0)


def _drawn(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """A token by its probability, after temperature, top-k, top-p and min-p."""
    temperature, top_k, top_p, min_p = state.settings[:4].unbind()
    logits = logits / temperature.masked_fill(temperature == 0, 1)
    logits, ids = logits.sort(descending=True, stable=True)
    weight = (logits - logits[0]).exp()
    rank = torch.arange(len(ids), device=ids.device)
    mass = (weight * _UNIT).long().masked_fill((top_k > 0) & (rank >= top_k), 0)
    end = mass.cumsum(0)
    past_top_p = (end - mass).double() >= top_p.double() * end[-1]  # who crosses it is kept
    mass = mass.masked_fill((past_top_p | (weight < min_p)) & (rank > 0), 0)
    spot = (random_share(state.stream) * mass.sum()).long()
    return ids[(mass.cumsum(0) <= spot).sum(0, keepdim=True)]


def _count(token: torch.Tensor, state: SamplingState) -> torch.Tensor:
    state.counts.index_add_(0, token, torch.ones_like(token, dtype=torch.float32))
    state.seen.index_fill_(0, token, True)
    state.stream[1:] += 1
    return token


def sample_reference(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    logits = _penalised(logits, state)
    greedy = float(state.settings[0]) == 0
    return _count(logits.argmax(0, True) if greedy else _drawn(logits, state), state)


def sample_unsynchronized(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    logits = _penalised(logits, state)
    greedy = state.settings[0] == 0
    token = torch.where(greedy, logits.argmax(0, True), _drawn(logits, state))
    return _count(token, state)


def sample(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """Choose a token id, int64 [1], from logits f32 [V], and count it as part of the answer.

    Order: repeat penalty (divides positive and multiplies negative logits of tokens seen),
    frequency and presence penalty (subtracted for tokens of the answer), temperature, top-k, top-p,
    min-p, draw. Each filter looks at the probabilities that the one before it left over,
    renormalised. Temperature 0 takes the largest logit. Never waits for a GPU.
    """
    return (sample_unsynchronized if logits.is_cuda else sample_reference)(logits, state)
