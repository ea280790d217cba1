"""Recall: what share of the coming uses a forecast names, the predictor's and two by counting.

W windows of steps ahead, L layers of E experts, K of them used by a step, N = L * E flat ids.
`python -m tools.simulator.recall` compares more forecasts, and more closely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqmoe_cli.forecast.corpus import Corpus
from seqmoe_cli.forecast.predictions import Predictions
from seqmoe_cli.forecast.predictor import Predictor
from seqmoe_cli.forecast.trace import DECODE, Trace
from seqmoe_cli.residency.policies import HALF_LIFE, WIDTHS, WINDOWS

COUNTS = f"decayed counts, half-life {HALF_LIFE:g}"
MOST_TOKENS = 20_000


@dataclass(frozen=True)
class Recall:
    """`shares` by forecast, then by window, from 0 to 1: of the uses in that window, those of the
    `top` experts of a layer (K, K + 3 and 2 K) with the highest forecast."""

    num_tokens: int
    top: tuple[int, int, int]
    shares: dict[str, dict[str, list[float]]]

    def facts(self) -> dict[str, Any]:
        """What is stored with the predictor."""
        return {"top": list(self.top), "recall": self.shares}


def recall(
    learned: Trace,
    held_out: Trace,
    predictor: Predictor,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Recall:
    """Judge the predictor on the answers of `held_out`, its first 20,000 tokens, beside what
    counting in `learned` and in the steps so far can do. `tell`: tokens done, and all of them."""
    held_out = held_out.select(np.arange(len(held_out)) < MOST_TOKENS)
    shape, device = predictor.shape, predictor.base.device
    rates = Corpus(learned.select(learned.phase == DECODE), device).rates()
    corpus = Corpus(held_out, device)
    counts = _decayed_counts(corpus, rates)
    widths = torch.from_numpy(WIDTHS).to(device, torch.float32)
    top = tuple(min(n, shape.num_experts) for n in (shape.top_k, shape.top_k + 3, 2 * shape.top_k))
    hits = {name: torch.zeros(len(WINDOWS), 3) for name in ("popularity", COUNTS, "predictor")}
    total = torch.zeros(len(WINDOWS))
    for first, expected in Predictions(predictor, held_out).blocks():
        batch = corpus.batch(torch.tensor([first]), len(expected), warm=0)
        uses = batch.target[0] * (batch.counted[0] * widths).unsqueeze(-1)
        rows = (rates.expand(len(expected), -1), torch.stack([next(counts) for _ in expected]))
        forecasts = [row[:, None].expand_as(uses) for row in rows]
        forecasts.append(torch.from_numpy(expected).to(device))
        for name, forecast in zip(hits, forecasts, strict=True):
            among = _among(forecast, uses, shape.num_layers, max(top))
            hits[name] += among[:, [n - 1 for n in top]].cpu()
        total += uses.sum((0, 2)).cpu()
        tell(first + len(expected), len(held_out))
    shares = {name: found / total.clamp(min=1)[:, None] for name, found in hits.items()}
    rounded = {
        name: {
            steps_text(*window): [round(share, 4) for share in row]
            for window, row in zip(WINDOWS, found.tolist(), strict=True)
        }
        for name, found in shares.items()
    }
    return Recall(corpus.num_targets, (top[0], top[1], top[2]), rounded)


def _decayed_counts(corpus: Corpus, rates: Tensor) -> Iterator[Tensor]:
    """The rates of use [N] that are known before each token, which begin at the mean `rates`."""
    decay = 2 ** (-1 / HALF_LIFE)
    for start, end in zip(corpus.starts.tolist(), corpus.ends.tolist(), strict=True):
        now = rates
        for used in corpus.used(torch.arange(start, end, device=rates.device)):
            yield now
            now = now * decay
            now[used] += 1 - decay


def _among(forecast: Tensor, uses: Tensor, num_layers: int, most: int) -> Tensor:
    """How many of the uses [n, W, N] are of the 1, 2, .. `most` first experts of their layers,
    [W, most]."""
    by_layer = forecast.reshape(*uses.shape[:2], num_layers, -1)
    best = by_layer.topk(most, -1).indices
    return uses.view(by_layer.shape).gather(-1, best).sum((0, 2)).cumsum(-1)


def steps_text(first: int, last: int) -> str:
    """A window in words."""
    return f"step {first}" if first == last else f"steps {first}-{last}"
