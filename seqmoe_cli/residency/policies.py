"""Which expert is evicted: the scores of the policies, and the constants that the kernels share.

One rule holds for all policies: the victim is the slot whose expert has the smallest score, and of
equal scores the lowest slot. Every score is an int64 made by integer arithmetic alone, with the
roundings given here, so that the kernels and the simulator decide alike, bit for bit. A score
belongs to an expert, not to a slot: it survives eviction. The score of `forecast` is in
`seqmoe_kernels.eviction.expected_use`.

N experts of all layers by flat id, K wanted by an event, W windows of a forecast.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from seqmoe_kernels.eviction.units import GAP_SHIFT, NEVER
from seqmoe_kernels.eviction.units import ONE as ONE
from seqmoe_kernels.eviction.units import WINDOWS as WINDOWS

Ints = NDArray[np.int64]

EMPTY_SCORE = -1  # of a slot without an owner: below the score of every expert
HALF_LIFE = 16.0  # tokens in which a past use comes to count half as much
DISCOUNT = 2.0  # tokens ahead at which an expected use counts half as much


class Policy(Protocol):
    """Told of every step and event, it names victims."""

    def start_token(self, token: int) -> None:
        """The step of this number begins; numbers rise by one."""

    def use(self, layer: int, experts: Ints) -> None:
        """An event of this step: a layer wants these experts, flat ids [K], whether hit or miss."""

    def victims(self, owner: Ints, barred: Ints, incoming: Ints) -> Ints:
        """Slots [n] for the experts `incoming` [n]: `owner` [S] says which expert each slot has, -1
        for an empty one; slots `barred` must stay as they are. At least n others must be there."""


class ScoredPolicy:
    """`score` int64 [N + 1]: by expert; the last stands for an empty slot, whose owner is -1."""

    def __init__(self, num_experts: int) -> None:
        self.score = np.zeros(num_experts + 1, np.int64)
        self.score[-1] = EMPTY_SCORE

    def victims(self, owner: Ints, barred: Ints, incoming: Ints) -> Ints:
        candidates = self.score[owner]
        candidates[barred] = NEVER
        slots = np.empty(len(incoming), np.int64)
        for i in range(len(incoming)):
            slots[i] = victim = candidates.argmin()
            candidates[victim] = NEVER
        return slots


class Lru(ScoredPolicy):
    """The victim's last use is the longest ago. Score: the number of the event, from 1 on; 0 for an
    expert that was never used."""

    _clock = 0

    def start_token(self, token: int) -> None:
        """Time goes by events."""

    def use(self, layer: int, experts: Ints) -> None:
        self._clock += 1
        self.score[experts] = self._clock


# --- decayed frequency, as a logarithm ---

DOUBLING = 1 << 16  # score units in which a decayed count doubles
CLOCK_START = 1 << 26  # 1024 doublings: so far above 0 that "never used" counts as nothing
LOG2_1P = np.round(
    DOUBLING * np.log2(1 + np.exp2(-(np.arange(18 << GAP_SHIFT) + 0.5) / (1 << GAP_SHIFT)))
).astype(np.int64)
"""log2(1 + 2^-gap) in score units, for a gap in steps of 1/256 doubling; its last entry is 0."""


class DecayedFrequency(ScoredPolicy):
    """The victim has the smallest decayed count of uses, where a use counts half as much after each
    `half_life` tokens.

    The score is log2(sum over past uses of 2^(t / half_life)), t being the token of the use: as all
    counts decay by the same factor, theirs is the order of these sums at any time, and nothing has
    to be recomputed as time goes by. In units of 1/DOUBLING; 0 for an expert never used:

        tick  = round(DOUBLING / half_life), at least 1
        now   = CLOCK_START + token * tick
        score = max(score, now) + LOG2_1P[|score - now| >> 8]    (its last entry behind its end)
    """

    def __init__(self, num_experts: int, half_life: float = HALF_LIFE) -> None:
        super().__init__(num_experts)
        self.tick = max(round(DOUBLING / half_life), 1)
        self.now = CLOCK_START

    def start_token(self, token: int) -> None:
        self.now = CLOCK_START + token * self.tick

    def use(self, layer: int, experts: Ints) -> None:
        self.score[experts] = log2_sum(self.score[experts], self.now)


def log2_sum(score: Ints, now: int) -> Ints:
    """log2(2^score + 2^now), all in score units."""
    gap = np.minimum(np.abs(score - now) >> GAP_SHIFT, len(LOG2_1P) - 1)
    return np.asarray(np.maximum(score, now) + LOG2_1P[gap])


# --- eviction by forecast ---

WIDTHS = np.array([last - first + 1 for first, last in WINDOWS])
EXP2 = np.round(ONE * np.exp2((np.arange(256) + 0.5) / 256)).astype(np.int64)
"""2^x for x in [0, 1) in steps of 1/256, in units of 1/ONE."""


def discounted(discount: float = DISCOUNT) -> tuple[Ints, int]:
    """The weight of an expected use in each window, and the weight of the rate of decayed counts,
    which stands for all steps behind the last window; in units of 2^-16.

    A use n steps ahead weighs d^(n - 1), d = 2^(-1 / discount). A window weighs the mean of its
    steps. The steps behind the last one add up to d^8 / (1 - d)."""
    d = 2 ** (-1 / discount)
    weights = [np.mean([d ** (n - 1) for n in range(a, b + 1)]) for a, b in WINDOWS]
    tail = round((1 << 16) * d ** WINDOWS[-1][1] / (1 - d))
    return np.round(np.array(weights) * (1 << 16)).astype(np.int64), tail


def uses_per_count(half_life: float = HALF_LIFE) -> int:
    """Uses per step that a decayed count of 1 stands for, in units of 1/ONE."""
    return round(ONE * (1 - 2 ** (-1 / half_life)))
