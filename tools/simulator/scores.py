"""Policies that name victims by scores, over numpy. They decide as the kernels do, bit for bit.

N experts of all layers by flat id, K wanted by an event.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from seqmoe_cli.residency.policies import (
    CLOCK_START,
    GAP_SHIFT,
    HALF_LIFE,
    LOG2_1P,
    NEVER,
    Ints,
    ticks,
)

EMPTY_SCORE = -1  # of a slot without an owner: below the score of every expert


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


class DecayedFrequency(ScoredPolicy):
    """The victim has the smallest decayed count of uses, where a use counts half as much after each
    `half_life` tokens."""

    def __init__(self, num_experts: int, half_life: float = HALF_LIFE) -> None:
        super().__init__(num_experts)
        self.tick = ticks(half_life)
        self.now = CLOCK_START

    def start_token(self, token: int) -> None:
        self.now = CLOCK_START + token * self.tick

    def use(self, layer: int, experts: Ints) -> None:
        self.score[experts] = log2_sum(self.score[experts], self.now)


def log2_sum(score: Ints, now: int) -> Ints:
    """log2(2^score + 2^now), all in score units."""
    gap = np.minimum(np.abs(score - now) >> GAP_SHIFT, len(LOG2_1P) - 1)
    return np.asarray(np.maximum(score, now) + LOG2_1P[gap])
