"""Candidates for prefetch, from simulated look-ahead, a forecast, or the truth.

Behind an event a source names candidates: experts that have no slot, the probability of their use,
and the event that will use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from seqmoe_cli.residency.policies import ONE, Ints
from tools.simulator.events import TraceEvents
from tools.simulator.forecast_eviction import Blend

Accuracy = tuple[float, float]  # recall and precision, above 0 and at most 1


class Candidates(NamedTuple):
    """n experts, each once: flat ids, probabilities in units of 1/ONE, events that want them."""

    experts: Ints
    probability: Ints
    due: Ints


_NONE = Candidates(*np.empty((3, 0), np.int64))


class CandidateSource(Protocol):
    def candidates(self, event: int, absent: NDArray[np.bool_]) -> Candidates:
        """Candidates behind an event; `absent` [N]: experts without a slot or a copy under way."""

    def missed(self, event: int, num: int) -> None:
        """Without prefetch `num` of the event's experts would have been misses."""


class OraclePrefetch:
    """Knows what the next events want, as many events as a token has."""

    def __init__(self, routing: TraceEvents) -> None:
        self._routing = routing

    def missed(self, event: int, num: int) -> None:
        """Not used by the oracle."""

    def candidates(self, event: int, absent: NDArray[np.bool_]) -> Candidates:
        coming = self._routing.events[event + 1 : event + 1 + self._routing.num_layers]
        due, rank = np.nonzero(absent[coming])
        experts, first = np.unique(coming[due, rank], return_index=True)
        return Candidates(experts, np.full(len(experts), ONE), event + 1 + due[first])


class LookAhead:
    """The routers of the next layers on the present layer's state, simulated: the truth, blurred.

    `accuracy` has, for each number of layers ahead, the share of misses that are named, and the
    share of named absent experts that are used. A use that is named from afar is named from nearer
    too. Wrong names are absent experts of that layer, drawn evenly, as many as the precision asks
    for at the rate of misses of the last 16 tokens or so. It does not look into the next token,
    whose embedding is not known yet.
    """

    _DRAWN = 16  # for each event, from which wrong names are taken

    def __init__(self, routing: TraceEvents, accuracy: Sequence[Accuracy], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.accuracy = tuple(accuracy)
        self._events, self._num_layers = routing.events, routing.num_layers
        self._luck = rng.random(routing.events.shape, np.float32)
        num_events, of_layer = len(routing.events), routing.trace.num_experts
        self._wrong = rng.integers(0, of_layer, (num_events, self._DRAWN), np.int64)
        self._wrong += (np.arange(num_events) % self._num_layers * of_layer)[:, None]
        self._wrong_luck = rng.random(self._wrong.shape, np.float32)
        self._misses = 0.0  # of an event, on average
        self._fading = 1 / (16 * self._num_layers)

    def missed(self, event: int, num: int) -> None:
        rate = max(self._fading, 1 / (event + 1))
        self._misses += rate * (num - self._misses)

    def candidates(self, event: int, absent: NDArray[np.bool_]) -> Candidates:
        left = self._num_layers - 1 - event % self._num_layers
        parts = [self._named(event, n, absent) for n in range(1, 1 + min(left, len(self.accuracy)))]
        return Candidates(*(np.concatenate(part) for part in zip(_NONE, *parts, strict=True)))

    def _named(self, event: int, ahead: int, absent: NDArray[np.bool_]) -> Candidates:
        due = event + ahead
        recall, precision = self.accuracy[ahead - 1]
        wanted, wrong = self._events[due], self._wrong[due]
        right = wanted[(self._luck[due] < recall) & absent[wanted]]
        able = absent[wrong]
        expected = recall * self._misses * (1 - precision) / precision
        chance = expected / max(int(able.sum()), 1)
        wrong = wrong[able & (self._wrong_luck[due] < chance)]
        named = np.unique(np.concatenate((right, wrong[~np.isin(wrong, wanted)])))
        p = round(precision * ONE)
        return Candidates(named, np.full(len(named), p), np.full(len(named), due))


class FullPrefetch:
    """Look-ahead for the next layers, the blended forecast for the others of this token and for the
    first layers of the next one. What look-ahead has not named in the layers that it sees keeps the
    probability that is left: p (1 - recall) / (1 - p recall)."""

    def __init__(
        self, routing: TraceEvents, look_ahead: LookAhead, blend: Blend, least: float
    ) -> None:
        self._look_ahead, self._blend = look_ahead, blend
        self._num_layers, self._of_layer = routing.num_layers, routing.trace.num_experts
        self._least = round(least * ONE)
        self._token = -1
        self._likely = np.empty(0, np.int64)

    def missed(self, event: int, num: int) -> None:
        self._look_ahead.missed(event, num)

    def candidates(self, event: int, absent: NDArray[np.bool_]) -> Candidates:
        token, layer = divmod(event, self._num_layers)
        if token != self._token:
            self._token = token
            self._likely = np.flatnonzero(self._blend.expected[:2].max(0) >= self._least)
        named = self._look_ahead.candidates(event, absent)
        experts = self._likely[absent[self._likely]]
        experts = experts[~np.isin(experts, named.experts)]
        ahead = experts // self._of_layer - layer
        later = ahead <= 0
        ahead[later] += self._num_layers
        p = np.where(later, self._blend.expected[1, experts], self._blend.expected[0, experts])
        for near, (recall, _) in enumerate(self._look_ahead.accuracy, 1):
            seen = ~later & (ahead == near)
            q = p[seen] / ONE
            p[seen] = (ONE * q * (1 - recall) / (1 - q * recall)).astype(np.int64)
        own = Candidates(experts, p, event + ahead)
        return Candidates(*(np.concatenate(pair) for pair in zip(named, own, strict=True)))
