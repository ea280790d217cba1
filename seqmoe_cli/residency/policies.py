"""Who leaves the pool: the scores of the policies that know the past, and of those told a forecast.

The rule is one for all: the victim is the slot whose expert has the smallest score, and of equal
ones the lowest slot. Every score is an int64 made by integer arithmetic alone, with the roundings
that stand here, so that the kernels and the simulator decide alike, bit for bit. A score belongs to
an expert, not to a slot: it survives eviction. Imports no torch.

N experts of all layers by flat id, K wanted by an event, W windows of a forecast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

EMPTY_SCORE = -1  # of a slot without an owner: below the score of every expert
NEVER = int(np.iinfo(np.int64).max)  # of a slot that must not become a victim
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
_GAP_SHIFT = 8  # the table has 256 entries for a doubling
LOG2_1P = np.round(
    DOUBLING * np.log2(1 + np.exp2(-(np.arange(18 << _GAP_SHIFT) + 0.5) / (1 << _GAP_SHIFT)))
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
    gap = np.minimum(np.abs(score - now) >> _GAP_SHIFT, len(LOG2_1P) - 1)
    return np.asarray(np.maximum(score, now) + LOG2_1P[gap])


# --- eviction by forecast ---

ONE = 1 << 24  # probabilities and expected uses in units of 1/ONE
WINDOWS = ((1, 1), (2, 2), (3, 4), (5, 8))
"""Steps ahead that a forecast tells apart, first and last; 1 is the step that begins."""
WIDTHS = np.array([last - first + 1 for first, last in WINDOWS])
EXP2 = np.round(ONE * np.exp2((np.arange(256) + 0.5) / 256)).astype(np.int64)
"""2^x for x in [0, 1) in steps of 1/256, in units of 1/ONE."""

ForecastAt = Callable[[int], NDArray[Any]]
"""The forecast when the step of a number begins, from what is known by then: int32 or int64 [W, N],
how often each expert will be used in each window, in units of 1/ONE."""


def exp2_fixed(exponent: Ints) -> Ints:
    """2^exponent in units of 1/ONE; exponents in score units, below 30 doublings."""
    whole = exponent >> 16
    mantissa = EXP2[(exponent >> 8) & 255]
    shifted: Ints = mantissa << np.maximum(whole, 0) >> np.clip(-whole, 0, 63)
    return shifted


class Blend:
    """A forecast and decayed counts, mixed by how well the forecast has done lately.

    Decayed counts make a forecast of their own: an expert goes on at the rate at which it was
    used. For each window the mix is `trust * forecast + (1 - trust) * rate`, and trust in [0, 1] is
    what would have given the least squared error in the last 64 steps or so. A forecast that is no
    better than the counts loses its weight by itself; so does one that is all zero.

        rate  = exp2_fixed(score - now) * round(ONE * (1 - 2^(-1 / half_life))) >> 24
        error sums, per window, in units of 2^-24, from values cut to multiples of 1/4096:
            sum -= sum >> 6;  top += (used - rate) . (forecast - rate);  base += |forecast - rate|^2
        trust = clamp(256 * top / base, 0, 256), rounded down, in units of 1/256; 0 while base is 0
    """

    def __init__(
        self, num_experts: int, forecast: ForecastAt, half_life: float = HALF_LIFE
    ) -> None:
        self.counts = DecayedFrequency(num_experts, half_life)
        self.trust = np.zeros(len(WINDOWS), np.int64)  # in units of 1/256
        self.expected = np.zeros((len(WINDOWS), num_experts), np.int64)  # the mix, units of 1/ONE
        self._forecast, self._per_step = forecast, uses_per_count(half_life)
        self._sums = [[0, 0] for _ in WINDOWS]
        span = WINDOWS[-1][1]
        self._made: deque[tuple[Ints, Ints]] = deque(maxlen=span)  # forecasts and rates of steps
        self._used: deque[Ints] = deque(maxlen=span)  # what the last steps used, 0 or 1 by expert

    def start_token(self, token: int) -> None:
        """Judge past forecasts by what has become known, and mix the new one."""
        self.counts.start_token(token)
        self._judge()
        rate = self.rate()
        forecast = self._forecast(token).astype(np.int64)
        self._made.append((forecast, rate))
        self._used.append(np.zeros(len(rate), np.int64))
        goes_on = np.outer(WIDTHS, rate)
        self.expected = goes_on + (self.trust[:, None] * (forecast - goes_on) >> 8)

    def use(self, layer: int, experts: Ints) -> None:
        self.counts.use(layer, experts)
        self._used[-1][experts] = 1

    def rate(self, experts: Any = slice(-1)) -> Ints:
        """Uses per step that decayed counts let expect, in units of 1/ONE."""
        return exp2_fixed(self.counts.score[experts] - self.counts.now) * self._per_step >> 24

    def _judge(self) -> None:
        for window, (first, last) in enumerate(WINDOWS):
            if len(self._made) < last:
                continue
            forecast, rate = self._made[-last]  # its window ended with the step before this one
            used = sum(self._used[-1 - step] for step in range(last - first + 1))
            guess = rate * int(WIDTHS[window]) >> 12
            better = (forecast[window] >> 12) - guess
            sums = self._sums[window]
            for i, other in enumerate(((used << 12) - guess, better)):
                sums[i] += int(other @ better) - (sums[i] >> 6)
            top, base = sums
            self.trust[window] = min(max(256 * top // base, 0), 256) if base > 0 else 0


def discounted(discount: float = DISCOUNT) -> tuple[Ints, int]:
    """What a use in each window weighs, and what one in every step behind them does, in units of
    2^-16; see `ForecastEviction`."""
    d = 2 ** (-1 / discount)
    weights = [np.mean([d ** (n - 1) for n in range(a, b + 1)]) for a, b in WINDOWS]
    tail = round((1 << 16) * d ** WINDOWS[-1][1] / (1 - d))
    return np.round(np.array(weights) * (1 << 16)).astype(np.int64), tail


def uses_per_count(half_life: float = HALF_LIFE) -> int:
    """Uses per step that a decayed count of 1 stands for, in units of 1/ONE."""
    return round(ONE * (1 - 2 ** (-1 / half_life)))


class ForecastEviction(ScoredPolicy):
    """The victim has the smallest expected discounted use. Whoever drives it drives the blend too,
    before it.

    The score, in units of 2^-40, of an expert whose layer is still to come in this step:

        sum over windows of weight * expected  +  tail * rate

    A step that is n steps ahead weighs d^(n - 1), d = 2^(-1 / discount); a window has the mean of
    its steps; beyond the last one the rate of decayed counts goes on for ever, which weighs
    d^8 / (1 - d). Weights are rounded to units of 2^-16. Once a layer is passed, window 1 is over
    for all of its experts and is left out, and a use just made is in the rates at once:

        score += (tail + sum over other windows of weight * steps * (256 - trust) >> 8) * gain,

    where gain is by how much the use has raised the rate.
    """

    def __init__(self, num_layers: int, blend: Blend, discount: float = DISCOUNT) -> None:
        super().__init__(blend.expected.shape[1])
        self._blend, self._of_layer = blend, blend.expected.shape[1] // num_layers
        self._weights, self._tail = discounted(discount)
        self._rate = self._passed = self.score[:-1]
        self._per_gain = self._tail

    def start_token(self, token: int) -> None:
        blend, weights = self._blend, self._weights
        self._rate = blend.rate()
        self._passed = weights[1:] @ blend.expected[1:] + self._tail * self._rate
        self.score[:-1] = self._passed + weights[0] * blend.expected[0]
        doubt = weights[1:] * WIDTHS[1:] * (256 - blend.trust[1:]) >> 8
        self._per_gain = self._tail + int(doubt.sum())

    def use(self, layer: int, experts: Ints) -> None:
        own = slice(layer * self._of_layer, (layer + 1) * self._of_layer)
        self.score[own] = self._passed[own]
        self.score[experts] += self._per_gain * (self._blend.rate(experts) - self._rate[experts])
