"""Forecasts of coming uses: by counting, by a trained predictor, and the truth with errors.

Each is a `ForecastAt`: called for the step that begins, it uses only what is known by then (but
`Blurred`, which is made of the truth).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from seqmoe_cli.residency.policies import HALF_LIFE, ONE, WIDTHS, WINDOWS, Ints
from tools.simulator.events import TraceEvents
from tools.simulator.forecast_eviction import ForecastAt, exp2_fixed
from tools.simulator.scores import DecayedFrequency


def no_forecast(routing: TraceEvents) -> ForecastAt:
    """Nothing is said, so that decayed counts are all there is."""
    nothing = np.zeros((len(WINDOWS), routing.num_experts), np.int64)
    return lambda token: nothing


class _Watching:
    """Sees each step when it is over."""

    def __init__(self, routing: TraceEvents) -> None:
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

    def __init__(self, routing: TraceEvents) -> None:
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

    def __init__(self, routing: TraceEvents) -> None:
        super().__init__(routing)
        self._counts = np.zeros(routing.num_experts, np.int64)

    def _step(self, step: int, experts: Ints) -> None:
        self._counts[experts] += 1

    def __call__(self, token: int) -> Ints:
        self._catch_up(token)
        return np.outer(WIDTHS, self._counts * ONE // max(token, 1))


class Decayed(_Watching):
    """Every expert goes on at the rate of its decayed count."""

    def __init__(self, routing: TraceEvents, half_life: float = HALF_LIFE) -> None:
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


class Predicted:
    """What a trained predictor expects. `blocks` are those of `Predictions`: the whole trace in
    order. `tokens` [n]: the numbers of the tokens that are replayed, rising."""

    def __init__(self, blocks: Iterator[tuple[int, NDArray[np.float32]]], tokens: Ints) -> None:
        self._blocks, self._tokens = blocks, tokens
        self._first, self._block = next(blocks)

    def __call__(self, step: int) -> Ints:
        token = int(self._tokens[step])
        while token >= self._first + len(self._block):
            self._first, self._block = next(self._blocks)
        return np.asarray(np.rint(self._block[token - self._first] * ONE), np.int64)


class Blurred:
    """The truth, blurred: of the experts that a step will use, a share `recall` is named, and of
    those that are named, a share `precision` is used; one of each for every window. What is named
    has the precision as its probability.

    An expert that was not used in the last 64 steps is rare, and harder to forecast: for rare ones
    recall and precision are `rare` times as high. That matters, since a large pool misses little
    else. A use that is named from afar is named from nearer too, if recall does not rise with
    distance. Wrong names are, of the common ones, what other steps of the last 64 used in that
    layer, and of the rare ones any.
    """

    _BACK = 64  # steps
    _RARE_DRAWN = 8  # for each event, from which wrong names are taken

    def __init__(
        self,
        routing: TraceEvents,
        recall: Sequence[float],
        precision: Sequence[float],
        rare: float = 1.0,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        steps, layers, top_k = routing.trace.experts.shape
        self._num_experts = routing.num_experts
        self._events = routing.events.reshape(steps, layers, top_k)
        drawn = rng.integers(0, routing.trace.num_experts, (steps, layers, self._RARE_DRAWN))
        drawn += (np.arange(layers) * routing.trace.num_experts)[:, None]
        used_rare, drawn_rare = self._rare(self._events), self._rare(drawn)
        drawn[~drawn_rare] = -1
        self._classes = [
            _Class(self._events, ~used_rare, self._common(rng, 4 * top_k), recall, precision, rng),
            _Class(
                self._events, used_rare, drawn,
                [r * rare for r in recall], [p * rare for p in precision], rng,
            ),
        ]  # fmt: skip

    def _rare(self, experts: Ints) -> NDArray[np.bool_]:
        """Which of the experts [T, L, n] the 64 steps before did not use."""
        last = np.full(self._num_experts, -self._BACK - 1)
        rare = np.empty(experts.shape, bool)
        for step, used in enumerate(self._events):
            rare[step] = step - last[experts[step]] > self._BACK
            last[used] = step
        return rare

    def _common(self, rng: np.random.Generator, num: int) -> Ints:
        """What random steps among the last 64 used, for every event [T, L, num]."""
        steps, layers, top_k = self._events.shape
        back = rng.integers(1, self._BACK + 1, (steps, layers, num))
        step = np.maximum(np.arange(steps)[:, None, None] - back, 0)
        rank = rng.integers(0, top_k, (steps, layers, num))
        return np.asarray(self._events[step, np.arange(layers)[:, None], rank])

    def __call__(self, token: int) -> Ints:
        expected = np.zeros((len(WINDOWS), self._num_experts), np.int64)
        for window, (first, last) in enumerate(WINDOWS):
            for step in range(token + first - 1, min(token + last, len(self._events))):
                for group in self._classes:
                    weight = round(group.precision[window] * ONE)
                    expected[window, group.named(step, window)] += weight
        return expected

    def named(self, step: int, window: int) -> Ints:
        """The experts that are named for a step when it is in this window."""
        return np.concatenate([group.named(step, window) for group in self._classes])


class _Class:
    """Experts that are equally hard to forecast: `own` [T, L, K] says which uses are of this class,
    `wrong` [T, L, n] has names that may be given though they are not used; -1 is none."""

    def __init__(
        self,
        events: Ints,
        own: NDArray[np.bool_],
        wrong: Ints,
        recall: Sequence[float],
        precision: Sequence[float],
        rng: np.random.Generator,
    ) -> None:
        self.precision, self._recall = precision, recall
        self._events, self._wrong = events, np.sort(wrong, axis=2)
        self._luck = np.where(own, rng.random(events.shape, np.float32), np.float32(2))
        self._wrong_luck = rng.random(wrong.shape, np.float32)
        self._drop_right_and_double()
        usable, used = float((self._wrong >= 0).mean() * wrong.shape[2]), float(own.sum(2).mean())
        self._chance = [
            used * r * (1 - p) / (p * usable) if usable else 0.0
            for r, p in zip(recall, precision, strict=True)
        ]  # that a wrong name is given

    def _drop_right_and_double(self) -> None:
        wrong = self._wrong
        wrong[:, :, 1:][wrong[:, :, 1:] == wrong[:, :, :-1]] = -1
        for k in range(self._events.shape[2]):
            wrong[wrong == self._events[:, :, k : k + 1]] = -1

    def named(self, step: int, window: int) -> Ints:
        right = self._events[step][self._luck[step] < self._recall[window]]
        wrong = self._wrong[step]
        given = (wrong >= 0) & (self._wrong_luck[step] < self._chance[window])
        return np.concatenate((right, wrong[given]))
