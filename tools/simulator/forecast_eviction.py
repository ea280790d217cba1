"""Eviction by forecast, step by step in numpy: the mix of a forecast with decayed counts, and the
policy that scores experts with it. The kernels of `seqmoe_kernels.eviction` compute the same
integers; tests compare the two, bit for bit.

N experts of all layers by flat id, W windows of a forecast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqmoe_cli.residency.policies import (
    DISCOUNT,
    EXP2,
    HALF_LIFE,
    WIDTHS,
    WINDOWS,
    Ints,
    discounted,
    uses_per_count,
)
from tools.simulator.scores import DecayedFrequency, ScoredPolicy

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


class ForecastEviction(ScoredPolicy):
    """The victim has the smallest expected discounted use. The caller tells the blend of every
    step and event first, then this policy.

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
