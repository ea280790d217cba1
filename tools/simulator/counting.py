"""Forecasts by counting, which a trained predictor has to beat: popularity, persistence, decayed
counts, and tables over the token that comes next.

N flat expert ids, W windows of steps ahead. All of them see what a predictor sees: the steps so
far, and the token that the coming step evaluates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from seqmoe_cli.forecast.trace import DECODE, Trace
from seqmoe_cli.residency.policies import WIDTHS, WINDOWS
from tools.simulator.events import TraceEvents

Floats = NDArray[np.float32]
SPAN = WINDOWS[-1][1]
_BLOCK = 64
_HALF_LIVES = (4.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True)
class Sequences:
    """The tokens of a trace, T of them: flat ids `used` [T, L * K], where the sequence of each
    begins and ends, and which are judged: those of answers."""

    used: NDArray[np.int64]
    first: NDArray[np.int64]
    end: NDArray[np.int64]
    judged: NDArray[np.bool_]
    token: NDArray[np.int64] | None
    num_flat: int
    num_layers: int

    @classmethod
    def of(cls, trace: Trace) -> Sequences:
        starts = trace.starts
        ends = np.append(starts[1:], len(trace))
        routing = TraceEvents(trace)
        return cls(
            routing.events.reshape(len(trace), -1),
            np.repeat(starts, ends - starts),
            np.repeat(ends, ends - starts),
            trace.phase == DECODE,
            None if trace.token_ids is None else trace.token_ids.astype(np.int64),
            routing.num_experts,
            routing.num_layers,
        )

    def __len__(self) -> int:
        return len(self.used)

    def uses(self, first: int, last: int) -> Floats:
        """How often each window behind the tokens first .. last - 1 uses each expert, [n, W, N];
        beyond a sequence's end nothing is used."""
        index = np.arange(first, last)
        found = np.zeros((last - first, len(WINDOWS), self.num_flat), np.float32)
        for window, (near, far) in enumerate(WINDOWS):
            for ahead in range(near - 1, far):
                there = np.flatnonzero(index + ahead < self.end[index])
                found[there[:, None], window, self.used[index[there] + ahead]] += 1
        return found

    def known(self, first: int, last: int) -> NDArray[np.bool_]:
        """Where a token is judged and all of a window is there, [n, W]."""
        index = np.arange(first, last)
        far = np.array([window[1] for window in WINDOWS])
        inside = index[:, None] + far <= self.end[index, None]
        return np.asarray(inside & self.judged[index, None])

    def popularity(self) -> Floats:
        """Uses per step of each expert, [N]."""
        counts = np.bincount(self.used[self.judged].ravel(), minlength=self.num_flat)
        return (counts / max(int(self.judged.sum()), 1)).astype(np.float32)


class Popularity:
    """Every expert at its mean rate."""

    name = "popularity"

    def __init__(self, rates: Floats, sequences: Sequences) -> None:
        self._rates, self._sequences = rates, sequences

    def blocks(self) -> Iterator[tuple[int, Floats]]:
        """(number of the first token, uses expected from each on, [n, W, N])"""
        for first in range(0, len(self._sequences), _BLOCK):
            last = min(first + _BLOCK, len(self._sequences))
            yield first, self.expected(first, last)

    def expected(self, first: int, last: int) -> Floats:
        """From the tokens first .. last - 1 on, [n, W, N]; asked for in order."""
        rates = np.broadcast_to(self._rates, (last - first, self._sequences.num_flat))
        return rates[:, None] * WIDTHS[:, None].astype(np.float32)


class Decayed(Popularity):
    """Every expert at the rate of its decayed count, which begins at its mean rate; of those that
    are equal, the popular ones first."""

    def __init__(self, rates: Floats, sequences: Sequences, half_life: float) -> None:
        super().__init__(rates, sequences)
        self.name = f"decayed counts, half-life {half_life:g}"
        self._decay = np.float32(2 ** (-1 / half_life))
        self._now = rates

    def per_step(self, first: int, last: int) -> Floats:
        """[n, N]"""
        found = np.empty((last - first, len(self._rates)), np.float32)
        for i, token in enumerate(range(first, last)):
            if token == self._sequences.first[token]:
                self._now = self._rates
            else:
                self._now = self._now * self._decay
                self._now[self._sequences.used[token - 1]] += 1 - self._decay
            found[i] = self._now
        return found

    def expected(self, first: int, last: int) -> Floats:
        return self.per_step(first, last)[:, None] * WIDTHS[:, None].astype(np.float32)


class Persistence(Decayed):
    """What the last step used goes on being used."""

    def __init__(self, rates: Floats, sequences: Sequences) -> None:
        super().__init__(rates, sequences, 1 / 20)  # 2^-20 is left of all that was before
        self.name = "persistence"


class TokenTable(Popularity):
    """How often the windows behind a token use each expert, counted over the learned sequences;
    `prior` uses at the mean rate are added. Knows the tokens that the judged sequences have."""

    name = "token table"

    def __init__(self, learned: Sequences, sequences: Sequences, prior: float) -> None:
        super().__init__(learned.popularity(), sequences)
        assert learned.token is not None and sequences.token is not None
        self._row = np.full(1 + max(learned.token.max(), sequences.token.max()), -1)
        types = np.unique(sequences.token)
        self._row[types] = np.arange(len(types))
        self._table = np.zeros((len(types), len(WINDOWS), learned.num_flat), np.float32)
        self._seen = np.zeros((len(types), len(WINDOWS), 1), np.float32)
        self._count(learned)
        self._prior = np.float32(prior)

    def with_prior(self, prior: float) -> TokenTable:
        """The same counts."""
        other = object.__new__(TokenTable)
        other.__dict__ = self.__dict__ | {"_prior": np.float32(prior)}
        return other

    def _count(self, learned: Sequences) -> None:
        assert learned.token is not None
        row = self._row[learned.token]
        flat, width = self._table.reshape(-1), learned.num_flat
        for window, (near, far) in enumerate(WINDOWS):
            known = (row >= 0) & learned.judged & (np.arange(len(row)) + far <= learned.end)
            for part in np.array_split(np.flatnonzero(known), 1 + int(known.sum()) // 20000):
                self._seen[:, window, 0] += np.bincount(row[part], minlength=len(self._seen))
                place = ((row[part] * len(WINDOWS) + window) * width)[:, None]
                for ahead in range(near - 1, far):
                    np.add.at(flat, place + learned.used[part + ahead], 1)

    def expected(self, first: int, last: int) -> Floats:
        assert self._sequences.token is not None
        row = self._row[self._sequences.token[first:last]]
        prior = self._prior * super().expected(first, last)
        return np.asarray((self._table[row] + prior) / (self._seen[row] + self._prior))


class TableTimesCounts(Popularity):
    """The token table times a power of the decayed rate over the mean rate: the best that counting
    can do."""

    def __init__(self, table: TokenTable, counts: Decayed, power: float) -> None:
        super().__init__(counts._rates, counts._sequences)
        self.name = f"token table x {counts.name}"
        self._tokens, self._counts, self._power = table, counts, power

    def expected(self, first: int, last: int) -> Floats:
        least = np.float32(1e-3)
        lift = (self._counts.per_step(first, last) + least) / (self._rates + least)
        found = self._tokens.expected(first, last) * (lift**self._power)[:, None]
        return np.asarray(found, np.float32)


def forecasts_by_counting(learned: Sequences, held_out: Sequences, top_n: int) -> list[Popularity]:
    """All of them; where there is something to choose, what names the most of the first tokens
    that are held out, in the favour of counting."""
    rates = learned.popularity()
    sample = _head(held_out, 1000)
    half_life = max(
        _HALF_LIVES, key=lambda value: _recall(Decayed(rates, sample, value), sample, top_n)
    )
    counts = Decayed(rates, held_out, half_life)
    found: list[Popularity] = [
        Popularity(rates, held_out), Persistence(rates, held_out), counts
    ]  # fmt: skip
    if learned.token is None or held_out.token is None:
        return found
    table = TokenTable(learned, sample, 1.0)

    def quality(choice: tuple[float, float, float]) -> float:
        prior, power, half_life = choice
        both = TableTimesCounts(table.with_prior(prior), Decayed(rates, sample, half_life), power)
        return _recall(both, sample, top_n)

    prior, power, half_life = max(product((1.0, 4.0), (0.5, 1.0), _HALF_LIVES[1:]), key=quality)
    table = TokenTable(learned, held_out, prior)
    both = TableTimesCounts(table, Decayed(rates, held_out, half_life), power)
    return [*found, table, both]


def _head(sequences: Sequences, most: int) -> Sequences:
    count = min(len(sequences), most)
    cut = {name: getattr(sequences, name)[:count] for name in ("used", "first", "judged")}
    token = None if sequences.token is None else sequences.token[:count]
    return replace(sequences, **cut, end=np.minimum(sequences.end[:count], count), token=token)


def _recall(forecast: Popularity, sequences: Sequences, top_n: int) -> float:
    """Share of the uses of the step that begins that are among the `top_n` of their layer."""
    named = total = 0
    for first, expected in forecast.blocks():
        last = first + len(expected)
        judged = sequences.judged[first:last]
        uses = sequences.used[first:last][judged]
        named += int(among_top(expected[judged, 0], uses, sequences.num_layers, top_n).sum())
        total += uses.size
    return named / max(total, 1)


def among_top(scores: Floats, used: NDArray[np.int64], layers: int, n: int) -> NDArray[np.bool_]:
    """Which of the experts `used` [T, m] are among the `n` of their layers with the highest scores
    [T, N]."""
    by_layer = scores.reshape(len(scores), layers, scores.shape[1] // layers)
    n = min(n, by_layer.shape[2])
    best = np.argpartition(-by_layer, n - 1, axis=2)[:, :, :n]
    hot = np.zeros(by_layer.shape, bool)
    np.put_along_axis(hot, best, True, axis=2)
    return np.take_along_axis(hot.reshape(scores.shape), used, axis=1)
