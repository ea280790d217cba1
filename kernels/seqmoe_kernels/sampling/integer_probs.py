"""Probabilities and random numbers as integers, so that all devices draw the same token.

A token's *distance* tells how far it lies behind the likeliest one, in 2^-19 halvings of its
probability; its *mass* is its probability in units of 2^-32 of the largest. Only the distance comes
from floating point, by operations that round alike everywhere; sums of masses have one value in any
order. Each function stands here for tensors and for Triton.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

HALVING_BITS = 19
PART = 2**HALVING_BITS - 1  # selects the distance beyond whole halvings
NO_MASS = 32 << HALVING_BITS  # the distance from which on the mass is 0
UNIT = 2**32  # the largest mass
# 2^-x for 0 <= x < 1, to 1e-7: coefficients of (-x)^i in units of 2^-32.
POLYNOMIAL = (UNIT, 2977029614, 1031565859, 237500345, 39538602, 4058330)

_PER_NAT = 2**HALVING_BITS / math.log(2)
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # constants of SplitMix64, as signed numbers
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64

_HALVING_BITS, _PART, _NO_MASS = map(tl.constexpr, (HALVING_BITS, PART, NO_MASS))
_STEPS_PER_NAT = tl.constexpr(_PER_NAT)
_C0, _C1, _C2, _C3, _C4, _C5 = map(tl.constexpr, POLYNOMIAL)
_STRIDE, _FACTOR_1, _FACTOR_2 = map(tl.constexpr, (_GOLDEN, _MIX_1, _MIX_2))


def distances(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Logits f32 [V], temperature f32 scalar -> int32 [V], from 0 to NO_MASS."""
    steps = torch.full_like(temperature, _PER_NAT) / temperature
    behind = (logits.max() - logits) * steps
    return torch.fmax(behind, torch.zeros_like(behind)).clamp(max=NO_MASS).int()


def masses(distance: torch.Tensor) -> torch.Tensor:
    """Distances -> int64 of the same shape, from 0 to UNIT."""
    part = (distance & PART).long()
    mass = torch.full_like(part, POLYNOMIAL[-1])
    for coefficient in reversed(POLYNOMIAL[:-1]):
        mass = coefficient - (mass * part >> HALVING_BITS)
    return (mass >> (distance >> HALVING_BITS)).masked_fill(distance >= NO_MASS, 0)


def random_share(stream: torch.Tensor) -> torch.Tensor:
    """int64 [2], seed and number of the draw -> f64 [1], at least 0 and below 1, of 53 bits:
    SplitMix64."""

    def xor_shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
        return z ^ ((z >> bits) & ((1 << (64 - bits)) - 1))

    z = stream[:1] + (stream[1:] + 1) * _GOLDEN
    z = xor_shifted(z, 30) * _MIX_1
    z = xor_shifted(z, 27) * _MIX_2
    bits = (xor_shifted(z, 31) >> 11) & (2**53 - 1)
    return bits.double() / 2**53


@triton.jit
def distance_of(logit, peak, temperature):
    """`distances` in a kernel; `peak` is the largest logit."""
    behind = (peak - logit) * tl.div_rn(tl.full((), _STEPS_PER_NAT, tl.float32), temperature)
    return tl.minimum(tl.maximum(behind, 0.0), _NO_MASS).to(tl.int32)  # NaN becomes 0


@triton.jit
def mass_of(distance):
    """`masses` in a kernel."""
    part = (distance & _PART).to(tl.int64)
    mass = _C4 - (_C5 * part >> _HALVING_BITS)
    mass = _C3 - (mass * part >> _HALVING_BITS)
    mass = _C2 - (mass * part >> _HALVING_BITS)
    mass = _C1 - (mass * part >> _HALVING_BITS)
    mass = _C0 - (mass * part >> _HALVING_BITS)
    return tl.where(distance < _NO_MASS, mass >> (distance >> _HALVING_BITS).to(tl.int64), 0)


@triton.jit
def _xor_shifted(z, BITS: tl.constexpr):
    return z ^ ((z >> BITS) & ((1 << (64 - BITS)) - 1))


@triton.jit
def random_share_of(stream):
    """`random_share` in a kernel, from the seed and number at `stream`."""
    z = tl.load(stream) + (tl.load(stream + 1) + 1) * _STRIDE
    z = _xor_shifted(z, 30) * _FACTOR_1
    z = _xor_shifted(z, 27) * _FACTOR_2
    bits = (_xor_shifted(z, 31) >> 11) & ((1 << 53) - 1)
    return bits.to(tl.float64) * (0.5**53)
