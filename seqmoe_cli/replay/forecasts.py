"""Forecasts of coming uses: counts of the past, and the truth blurred to a recall and a precision.

Each is a `ForecastAt`: asked for the step that begins, it answers from what is known by then. A
trained predictor, or a recording of what one said, takes their place without any other change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seqmoe_cli.replay.policies import Routing
from seqmoe_cli.residency.policies import (
    HALF_LIFE,
    ONE,
    WIDTHS,
    WINDOWS,
    DecayedFrequency,
    ForecastAt,
    Ints,
    exp2_fixed,
)


def no_forecast(routing: Routing) -> ForecastAt:
    """Nothing is said, so that decayed counts are all there is."""
    nothing = np.zeros((len(WINDOWS), routing.num_experts), np.int64)
    return lambda token: nothing


class _Watching:
    """Sees the steps one after the other, each when it is over."""

    def __init__(self, routing: Routing) -> None:
        self._events, self._layers = routing.events, routing.num_layers
        self._num_experts, self._seen = routing.num_experts, 0

    def _catch_up(self, token: int) -> None:
        for step in range(self._seen, token):
            self._step(step, self._events[step * self._layers : (step + 1) * self._layers].ravel())
        self._seen = token

    def _step(self, step: int, experts: Ints) -> None:
        raise NotImplementedError


class Persistence(_Watching):
    """What the last step used will be used by each of the next ones."""

    def __init__(self, routing: Routing) -> None:
        super().__init__(routing)
        self._last = np.zeros(routing.num_experts, np.int64)

    def _step(self, step: int, experts: Ints) -> None:
        self._last[:] = 0
        self._last[experts] = ONE

    def __call__(self, token: int) -> Ints:
        self._catch_up(token)
        return np.outer(WIDTHS, self._last)


class Popularity(_Watching):
    """Every expert goes on at its mean rate of all steps so far."""

    def __init__(self, routing: Routing) -> None:
        super().__init__(routing)
        self._counts = np.zeros(routing.num_experts, np.int64)

    def _step(self, step: int, experts: Ints) -> None:
        self._counts[experts] += 1

    def __call__(self, token: int) -> Ints:
        self._catch_up(token)
        return np.outer(WIDTHS, self._counts * ONE // max(token, 1))


class Decayed(_Watching):
    """Every expert goes on at the rate of its decayed count."""

    def __init__(self, routing: Routing, half_life: float = HALF_LIFE) -> None:
        super().__init__(routing)
        self._counts = DecayedFrequency(routing.num_experts, half_life)
        self._per_step = 1 - 2 ** (-1 / half_life)

    def _step(self, step: int, experts: Ints) -> None:
        self._counts.start_token(step)
        self._counts.use(0, experts)

    def __call__(self, token: int) -> Ints:
        self._catch_up(token)
        self._counts.start_token(token)
        decayed = exp2_fixed(self._counts.score[:-1] - self._counts.now)
        return np.outer(WIDTHS, (decayed * self._per_step).astype(np.int64))


class Blurred:
    """The truth, blurred: of the experts that a step will use, a share `recall` is named, and of
    those that are named, a share `precision` is used; one of each for every window. What is named
    has the precision as its probability.

    A use that is named from afar is named from nearer too, if recall does not rise with distance.
    Wrong names are what other steps of the last 64 used in that layer: popular experts, as a model
    would name them.
    """

    _BACK = 64  # steps

    def __init__(
        self, routing: Routing, recall: Sequence[float], precision: Sequence[float], seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self._recall, self._precision = recall, precision
        self._num_experts, (steps, layers, top_k) = routing.num_experts, routing.trace.experts.shape
        self._events = routing.events.reshape(steps, layers, top_k)
        self._luck = rng.random(self._events.shape, np.float32)
        self._wrong = self._draw(rng, 4 * top_k)
        self._wrong_luck = rng.random(self._wrong.shape, np.float32)
        usable = (self._wrong >= 0).mean() * 4
        self._chance = [
            r * (1 - p) / (p * usable) for r, p in zip(recall, precision, strict=True)
        ]  # that a drawn wrong name is given

    def _draw(self, rng: np.random.Generator, num: int) -> Ints:
        """Wrong names for every event [T, L, num]; -1 for one that is right or there twice."""
        steps, layers, top_k = self._events.shape
        back = rng.integers(1, self._BACK + 1, (steps, layers, num))
        step = np.maximum(np.arange(steps)[:, None, None] - back, 0)
        rank = rng.integers(0, top_k, (steps, layers, num))
        drawn = np.sort(self._events[step, np.arange(layers)[:, None], rank], axis=2)
        drawn[:, :, 1:][drawn[:, :, 1:] == drawn[:, :, :-1]] = -1
        for k in range(top_k):
            drawn[drawn == self._events[:, :, k : k + 1]] = -1
        return drawn

    def __call__(self, token: int) -> Ints:
        expected = np.zeros((len(WINDOWS), self._num_experts), np.int64)
        for window, (first, last) in enumerate(WINDOWS):
            weight = round(self._precision[window] * ONE)
            for step in range(token + first - 1, min(token + last, len(self._events))):
                expected[window, self.named(step, window)] += weight
        return expected

    def named(self, step: int, window: int) -> Ints:
        """The experts that are named for a step when it is in this window."""
        right = self._events[step][self._luck[step] < self._recall[window]]
        wrong = self._wrong[step]
        given = (wrong >= 0) & (self._wrong_luck[step] < self._chance[window])
        return np.concatenate((right, wrong[given]))
