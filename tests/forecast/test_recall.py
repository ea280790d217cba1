"""Recall is what a slow count by hand gives."""

from __future__ import annotations

import numpy as np
import pytest

from seqmoe_cli.forecast.corpus import divide
from seqmoe_cli.forecast.predictions import Predictions
from seqmoe_cli.forecast.recall import COUNTS, recall, steps_text
from seqmoe_cli.forecast.trace import DECODE
from seqmoe_cli.residency.policies import HALF_LIFE, WINDOWS
from tests.forecast.predictors import random_predictor, small_shape
from tests.traces import EXPERTS, LAYERS, TOP_K, written_trace

NUM_FLAT, LENGTH = LAYERS * EXPERTS, 40


def test_recall_by_hand() -> None:
    learned, held_out = divide(written_trace(20, LENGTH))
    predictor, told = random_predictor(small_shape()), list[tuple[int, int]]()
    found = recall(learned, held_out, predictor, lambda *progress: told.append(progress))
    assert found.top == (TOP_K, TOP_K + 3, 2 * TOP_K) and told[-1] == (2 * LENGTH, 2 * LENGTH)
    assert found.num_tokens == (held_out.phase == DECODE).sum()

    flat, past = (
        (trace.experts + EXPERTS * np.arange(LAYERS)[:, None]).reshape(len(trace), -1)
        for trace in (held_out, learned)
    )
    answers = past[learned.phase == DECODE]
    rates = np.bincount(answers.ravel(), minlength=NUM_FLAT) / len(answers)
    decay, now = 2 ** (-1 / HALF_LIFE), rates
    by_predictor = np.concatenate([b for _, b in Predictions(predictor, held_out).blocks()])
    hits = {name: np.zeros((len(WINDOWS), 3)) for name in found.shares}
    total = np.zeros(len(WINDOWS))
    for token in range(len(held_out)):
        if token % LENGTH == 0:
            now = rates
        else:
            now = now * decay
            now[flat[token - 1]] += 1 - decay
        for w, (near, far) in enumerate(WINDOWS):
            if not held_out.phase[token] or token % LENGTH + far > LENGTH:
                continue
            uses = np.bincount(flat[token + near - 1 : token + far].ravel(), minlength=NUM_FLAT)
            total[w] += uses.sum()
            for name, scores in zip(hits, (rates, now, by_predictor[token, w]), strict=True):
                order = np.argsort(-scores.reshape(LAYERS, -1), axis=1, kind="stable")
                for i, n in enumerate(found.top):
                    named = np.take_along_axis(uses.reshape(LAYERS, -1), order[:, :n], 1)
                    hits[name][w, i] += named.sum()
    assert list(hits) == ["popularity", COUNTS, "predictor"]
    for name, counted in hits.items():
        for w, window in enumerate(WINDOWS):
            shares = found.shares[name][steps_text(*window)]
            assert shares == pytest.approx(counted[w] / total[w], abs=2e-3), (name, window)
