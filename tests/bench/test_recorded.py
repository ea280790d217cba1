"""Simulated look-ahead has the recall and the precision that it claims."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from seqmoe_cli.bench.recorded import ACCURACY, FORECAST, blurred_names, blurred_uses
from seqmoe_cli.forecast.shipped import open_trace
from seqmoe_cli.forecast.trace import DECODE


@pytest.mark.parametrize("share", [0.25, 0.45])
def test_recall_of_misses_and_precision_of_names(share: float) -> None:
    trace = open_trace("qwen3")
    experts = trace.select(trace.phase == DECODE).experts[:96]
    of_layer, num_slots = trace.num_experts, int(share * trace.num_layers * trace.num_experts)
    names = blurred_names(experts, of_layer, num_slots)
    steps, layers, top_k = experts.shape
    assert names.shape == (steps, layers, 4, top_k)
    counts = np.zeros((4, 3))
    pool = OrderedDict[int, None]()
    for step in range(steps):
        for layer in range(layers):
            wanted = set((experts[step, layer].astype(int) + layer * of_layer).tolist())
            missed = {e for e in wanted if e not in pool}
            for d in range(4):
                row = names[step, layer - 1 - d, d] if layer > d else np.array([], int)
                row = row[row >= 0]
                assert len(set(row.tolist())) == len(row) and (row < of_layer).all()
                absent = {e for e in (row + layer * of_layer).tolist() if e not in pool}
                if layer > d and step > 8:  # at first nearly all experts are missing
                    counts[d] += len(missed), len(absent), len(absent & missed)
            for e in wanted:
                pool[e] = None
                pool.move_to_end(e)
            while len(pool) > num_slots:
                pool.popitem(last=False)
    recall, precision = counts[:, 2] / counts[:, 0], counts[:, 2] / counts[:, 1]
    np.testing.assert_allclose(np.stack((recall, precision), 1), ACCURACY, atol=0.06)


def test_a_simulated_forecast_names_misses() -> None:
    trace = open_trace("qwen3")
    experts = trace.select(trace.phase == DECODE).experts[:96]
    num, num_slots = trace.num_experts, int(0.45 * trace.num_layers * trace.num_experts)
    uses = blurred_uses(experts, num, num_slots)
    assert uses.shape == (96, trace.num_layers * num) and set(np.unique(uses)) == {
        0.0,
        np.float32(FORECAST[1]),
    }
    pool, counts = OrderedDict[int, None](), np.zeros(3)
    for step, layer in np.ndindex(experts.shape[:2]):
        wanted = set((experts[step, layer].astype(int) + layer * num).tolist())
        named = set((np.flatnonzero(uses[step, layer * num :][:num]) + layer * num).tolist())
        missed = wanted - set(pool)
        assert not named & set(pool)
        counts += len(missed), len(named), len(missed & named)
        for e in wanted:
            pool[e] = None
            pool.move_to_end(e)
        while len(pool) > num_slots:
            pool.popitem(last=False)
    np.testing.assert_allclose(counts[2] / counts[:2], FORECAST, atol=0.05)


def test_nothing_is_said_of_the_next_token() -> None:
    names = blurred_names(np.arange(24).reshape(4, 3, 2) % 5, 5, 6, [(1.0, 1.0)] * 4)
    for layer in range(3):
        assert (names[:, layer, 2 - layer :] == -1).all()
    np.testing.assert_array_equal(np.sort(names[1, 0, 0]), np.sort([3, 4]))
