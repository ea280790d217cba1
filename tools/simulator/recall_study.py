"""Recall: what share of the coming uses a forecast names, by distance, depth and kind of expert.

T tokens, L layers of E experts, K used by a step, W windows of steps ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seqmoe_cli.forecast.trace import Trace
from seqmoe_cli.residency.policies import WINDOWS
from tools.simulator.counting import Floats, Sequences, among_top, forecasts_by_counting
from tools.simulator.scores import Lru
from tools.simulator.slot_table import SlotTable

Blocks = Callable[[], Iterator[tuple[int, Floats]]]
"""Forecasts in order: (number of the first token, uses expected from each on, f32 [n, W, N])."""
POOLS = (25, 45)  # percent of all experts
GROUPS = ("early", "middle", "late")  # thirds of the layers
_BACK = 64  # an expert that so many steps did not use is rare


@dataclass(frozen=True)
class Missing:
    """What LRU misses at a size of the pool: `absent` [T, L, E] marks the experts that had no slot
    when their layer began, `counted` [T] is false until the pool is full."""

    percent: int
    absent: NDArray[np.bool_]
    counted: NDArray[np.bool_]

    @classmethod
    def under_lru(cls, sequences: Sequences, percent: int) -> Missing:
        """Tokens that are not judged go by without a lookup, as prompts do in a replay."""
        tokens, layers = len(sequences), sequences.num_layers
        num_slots = max(sequences.num_flat * percent // 100, sequences.used.shape[1] // layers)
        table, policy = SlotTable(num_slots, sequences.num_flat), Lru(sequences.num_flat)
        absent = np.zeros((tokens, layers, sequences.num_flat // layers), bool)
        counted, none = np.zeros(tokens, bool), np.empty(0, np.int64)
        for token in np.flatnonzero(sequences.judged):
            counted[token] = table.owner.min() >= 0
            for layer, wanted in enumerate(sequences.used[token].reshape(layers, -1)):
                absent[token, layer] = table.slot_of.reshape(layers, -1)[layer] < 0
                table.require(wanted, policy, none)
                policy.use(layer, wanted)
        return cls(percent, absent, counted)


@dataclass(frozen=True)
class Score:
    """The recall of one forecast, all from 0 to 1. `by_depth` [W, 3, 3]: of uses in each window, in
    each third of the layers, among the top K, K + 3 and 2 K of a layer; `overall` [W, 3].

    Of the step that begins: `rare` among the top K + 3, of uses of experts that the last 64 steps
    of the sequence did not use; `misses`, by percent, likewise of what LRU misses; `named`, by
    percent, the share of what LRU misses that is among the likeliest absent experts of all layers,
    as many as are missed on average: recall and precision in one.
    """

    forecast: str
    overall: Floats
    by_depth: Floats
    rare: float
    misses: dict[int, float]
    named: dict[int, float]


@dataclass(frozen=True)
class Recall:
    """The scores of all forecasts on the same tokens. `num_misses`: per token, by percent."""

    scores: list[Score]
    top: tuple[int, int, int]
    num_tokens: int
    rare_share: float
    num_misses: dict[int, float]


def recall(
    learned: Trace,
    held_out: Trace,
    predicted: Blocks | None,
    most_tokens: int = 20_000,
    tell: Callable[[str], None] = lambda text: None,
) -> Recall:
    """Judge all that counting can do with `learned`, and `predicted` if it is there, on the answers
    of `held_out`, the first `most_tokens` tokens of it."""
    held_out = held_out.select(np.arange(len(held_out)) < most_tokens)
    sequences, top_k = Sequences.of(held_out), held_out.top_k
    tell("what LRU misses")
    judge = _Judge(sequences, top_k)
    tell("forecasts by counting")
    counted = forecasts_by_counting(Sequences.of(learned), sequences, top_k + 3)
    named: list[tuple[str, Blocks]] = [(forecast.name, forecast.blocks) for forecast in counted]
    named += [("predictor", predicted)] if predicted else []
    scores = []
    for name, blocks in named:
        tell(f"recall of {name}")
        scores.append(judge.score(name, blocks))
    return Recall(
        scores, judge.top, int(sequences.judged.sum()), judge.rare_share, judge.num_misses
    )


class _Judge:
    """What really came, and what of it was rare or missing."""

    def __init__(self, sequences: Sequences, top_k: int) -> None:
        self._sequences, of_layer = sequences, sequences.num_flat // sequences.num_layers
        self.top = (top_k, min(top_k + 3, of_layer), min(2 * top_k, of_layer))
        self._rare = _rare(sequences)
        self._missing = [Missing.under_lru(sequences, percent) for percent in POOLS]
        self.rare_share = float(self._rare[sequences.judged].mean())
        self.num_misses = {
            missing.percent: float(self._missed(missing, missing.counted).sum(1).mean())
            for missing in self._missing
            if missing.counted.any()
        }

    def _missed(self, missing: Missing, tokens: NDArray[np.bool_] | slice) -> NDArray[np.bool_]:
        """Which uses of some tokens had no slot, [n, L * K]."""
        used = self._sequences.used[tokens]
        absent = missing.absent[tokens].reshape(len(used), self._sequences.num_flat)
        return np.take_along_axis(absent, used, axis=1)

    def score(self, name: str, blocks: Blocks) -> Score:
        hits = np.zeros((len(WINDOWS), 3, len(GROUPS)))
        total = np.zeros((len(WINDOWS), len(GROUPS)))
        tally = _Tally()
        for first, expected in blocks():
            if first >= len(self._sequences):
                break
            expected = expected[: len(self._sequences) - first]
            last = first + len(expected)
            known, uses = self._sequences.known(first, last), self._sequences.uses(first, last)
            for window in range(len(WINDOWS)):
                here = known[:, window]
                found, whole = self._by_depth(expected[here, window], uses[here, window])
                hits[window] += found
                total[window] += whole
            self._closely(expected[:, 0], first, last, tally)
        by_depth = hits / np.maximum(total, 1)[:, None]
        overall = hits.sum(2) / np.maximum(total.sum(1), 1)[:, None]
        kinds = {kind: tally.share(kind) for kind in tally.total}
        return Score(
            name,
            overall.astype(np.float32),
            by_depth.transpose(0, 2, 1).astype(np.float32),
            kinds.get("rare", 0.0),
            {percent: kinds[f"missed {percent}"] for percent in self.num_misses},
            {percent: kinds[f"named {percent}"] for percent in self.num_misses},
        )

    def _by_depth(self, scores: Floats, uses: Floats) -> tuple[Floats, Floats]:
        """Uses [n, N] that are among the top of their layers [3, groups], and all uses [groups]."""
        layers = self._sequences.num_layers
        scores, uses = (x.reshape(len(x), layers, x.shape[1] // layers) for x in (scores, uses))
        most = max(self.top)
        best = np.argpartition(-scores, most - 1, axis=2)[:, :, :most]
        order = np.argsort(-np.take_along_axis(scores, best, 2), axis=2, kind="stable")
        best = np.take_along_axis(best, order, axis=2)
        among = np.take_along_axis(uses, best, axis=2).sum(0).cumsum(1)  # [L, most]
        whole = uses.sum((0, 2))
        thirds = np.array_split(np.arange(layers), len(GROUPS))
        found = [[among[third, n - 1].sum() for third in thirds] for n in self.top]
        return np.array(found), np.array([whole[third].sum() for third in thirds])

    def _closely(self, scores: Floats, first: int, last: int, tally: _Tally) -> None:
        """The rare and the missing of the step that begins."""
        part = slice(first, last)
        used, judged = self._sequences.used[part], self._sequences.judged[part]
        top = among_top(scores, used, self._sequences.num_layers, self.top[1])
        tally.add("rare", top, self._rare[part] & judged[:, None])
        for missing in self._missing:
            if missing.percent not in self.num_misses:
                continue
            counted = missing.counted[part]
            missed = self._missed(missing, part) & counted[:, None]
            tally.add(f"missed {missing.percent}", top, missed)
            absent = missing.absent[part].reshape(scores.shape)
            n = max(round(self.num_misses[missing.percent]), 1)
            likely = among_top(np.where(absent, scores, -1), used, 1, n)
            tally.add(f"named {missing.percent}", likely, missed)


class _Tally:
    """Hits among many, by kind."""

    def __init__(self) -> None:
        self.hits: dict[str, int] = {}
        self.total: dict[str, int] = {}

    def add(self, kind: str, right: NDArray[np.bool_], among: NDArray[np.bool_]) -> None:
        self.hits[kind] = self.hits.get(kind, 0) + int((right & among).sum())
        self.total[kind] = self.total.get(kind, 0) + int(among.sum())

    def share(self, kind: str) -> float:
        return self.hits[kind] / max(self.total[kind], 1)


def _rare(sequences: Sequences) -> NDArray[np.bool_]:
    """Which uses [T, L * K] are of experts that the 64 steps before, in the same sequence, did not
    use."""
    last = np.full(sequences.num_flat, -_BACK - 1)
    rare = np.empty(sequences.used.shape, bool)
    for token, used in enumerate(sequences.used):
        if token == sequences.first[token]:
            last[:] = -len(rare) - _BACK
        rare[token] = token - last[used] > _BACK
        last[used] = token
    return rare


def best_by_counting(scores: Sequence[Score]) -> Score:
    """Whatever counts and names the most of the step that begins."""
    return max(
        (s for s in scores if s.forecast != "predictor"), key=lambda s: float(s.overall[0, 1])
    )
