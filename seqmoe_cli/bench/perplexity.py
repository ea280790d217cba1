"""How well a model predicts a text: negative log-likelihood over windows of the context size."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seqmoe_cli.errors import SeqmoeError
from seqmoe_cli.residency.stats import StepStats

if TYPE_CHECKING:
    from seqmoe_cli.engine.engine import Engine

MAX_NLL = 700.0  # of a token; exp of it is still a float


@dataclass(frozen=True)
class Score:
    """`tokens` predicted, the mean of their negative natural log-likelihoods, and what the pool
    did meanwhile; a window asks once for each expert of a layer."""

    tokens: int
    nll_per_token: float
    spent: StepStats

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll_per_token)


def windows(num_tokens: int, size: int) -> list[range]:
    """Windows of at most `size` tokens (at least 2) that overlap by one: the first token of a
    window is the last of the one before.

    So each of the tokens 1..num_tokens-1 is predicted exactly once, from all tokens of its window
    before it; token 0 is predicted by nothing. A text that fits is one window.
    """
    return [
        range(start, min(start + size, num_tokens)) for start in range(0, num_tokens - 1, size - 1)
    ]


def score(engine: Engine, ids: Sequence[int], progress: Callable[[int, int], None]) -> Score:
    """Score a text of at least 2 token ids; `progress` is told (done, total) tokens.

    Raises `SeqmoeError` when the model's probabilities are not numbers, or next to zero.
    """
    start, before = time.perf_counter(), engine.pool.counters()
    total = sum(
        _nll(engine, ids, window, progress) for window in windows(len(ids), engine.ctx_size)
    )
    mean = total / (len(ids) - 1)
    if not mean < MAX_NLL:  # NaN compares as false
        raise SeqmoeError(
            f"negative log-likelihood {mean:g} per token: the weights cannot be right",
            "check the model with seqmoe info --verify, or try --dtype float32",
        )
    spent = StepStats.between(
        before,
        engine.pool.counters(),
        engine.plan.record_bytes,
        "prefill",
        len(ids) - 1,
        time.perf_counter() - start,
    )
    return Score(len(ids) - 1, mean, spent)


def _nll(
    engine: Engine, ids: Sequence[int], window: range, progress: Callable[[int, int], None]
) -> float:
    """Negative log-likelihood of all tokens of a window but its first."""
    found = engine.log_likelihoods(
        ids[window.start : window.stop],
        lambda done, _: progress(window.start + done, len(ids)),
    )
    return -float(found.double().sum())
