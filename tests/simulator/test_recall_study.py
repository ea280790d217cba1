"""Recall is what a slow count by hand gives, and counting forecasts count rightly."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from seqmoe_cli.forecast.corpus import divide
from seqmoe_cli.forecast.stored import StoredPredictor
from seqmoe_cli.forecast.trace import Trace
from seqmoe_cli.residency.policies import WINDOWS
from tests.forecast.predictors import random_predictor, small_shape
from tests.traces import random_trace, written_trace
from tools.simulator.counting import (
    Decayed,
    Persistence,
    Popularity,
    Sequences,
    TokenTable,
    forecasts_by_counting,
)
from tools.simulator.recall import main
from tools.simulator.recall_study import recall
from tools.simulator.recall_table import recall_facts, recall_tables

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def spoken(seed: int, sequences: int = 3, length: int = 40) -> Trace:
    trace = random_trace(seed, sequences * length, LAYERS, EXPERTS, TOP_K)
    rng = np.random.default_rng(seed)
    return Trace(
        trace.model,
        trace.family,
        EXPERTS,
        trace.experts,
        np.repeat(np.arange(sequences, dtype=np.uint32), length),
        np.tile(np.arange(length) >= 4, sequences).astype(np.uint8),
        rng.integers(0, 6, sequences * length).astype(np.uint32),
    )


def uses(trace: Trace, token: int, window: tuple[int, int]) -> Counter[int] | None:
    """Uses by flat id in a window behind a token; None when its sequence ends before."""
    last = token + window[1] - 1
    if last >= len(trace) or trace.sequence[last] != trace.sequence[token]:
        return None
    found: Counter[int] = Counter()
    for t in range(token + window[0] - 1, last + 1):
        for layer in range(LAYERS):
            found.update((layer * EXPERTS + trace.experts[t, layer].astype(int)).tolist())
    return found


def test_recall_by_hand() -> None:
    learned, held_out = spoken(0), spoken(1)
    rng = np.random.default_rng(2)
    said = rng.random((len(held_out), len(WINDOWS), LAYERS * EXPERTS)).astype(np.float32)

    def blocks() -> Iterator[tuple[int, NDArray[np.float32]]]:
        yield 0, said[:50]
        yield 50, said[50:]

    found = recall(learned, held_out, blocks)
    own = found.scores[-1]
    assert own.forecast == "predictor" and found.top == (2, 5, 4) and found.num_tokens == 108
    for w, window in enumerate(WINDOWS):
        for i, n in enumerate(found.top):
            hits, total = np.zeros((2, LAYERS))
            for token in np.flatnonzero(held_out.phase):
                counted = uses(held_out, int(token), window)
                for layer in range(LAYERS) if counted else ():
                    scores = said[token, w, layer * EXPERTS : (layer + 1) * EXPERTS]
                    named = layer * EXPERTS + np.argsort(-scores)[:n]
                    hits[layer] += sum(counted[e] for e in named.tolist())  # type: ignore[index]
                    total[layer] += sum(
                        m
                        for e, m in counted.items()
                        if e // EXPERTS == layer  # type: ignore[union-attr]
                    )
            np.testing.assert_allclose(own.by_depth[w, :, i], hits / total, rtol=1e-5)
            np.testing.assert_allclose(own.overall[w, i], hits.sum() / total.sum(), rtol=1e-5)


def test_the_truth_is_found_whole() -> None:
    held_out = spoken(3)
    truth = np.zeros((len(held_out), len(WINDOWS), LAYERS * EXPERTS), np.float32)
    flat = held_out.experts + EXPERTS * np.arange(LAYERS)[:, None]
    np.put_along_axis(truth[:, 0], flat.reshape(len(flat), -1), 1, axis=1)
    found = recall(spoken(4), held_out, lambda: iter([(0, truth)]))
    own = found.scores[-1]
    assert own.overall[0].tolist() == [1, 1, 1] and own.rare == 1
    assert set(own.misses) == set(found.num_misses) == {25, 45}
    assert own.misses == {25: 1, 45: 1}
    # As many are named as are missed on average, so a token with more misses has some left over.
    assert all(0.75 < share <= 1 for share in own.named.values())
    others = [score for score in found.scores if score is not own]
    assert max(score.overall[0, 0] for score in others) < 0.8


def test_rare_and_missed_uses_by_hand() -> None:
    held_out = spoken(6, sequences=2, length=90)
    found = recall(spoken(5), held_out, None)
    flat = held_out.experts + EXPERTS * np.arange(LAYERS)[:, None]
    slots, last_use = [-1] * (45 * LAYERS * EXPERTS // 100), dict[int, int]()
    missed, rare = list[int](), list[bool]()
    for token in range(len(held_out)):
        before = flat[max(token - 64, token // 90 * 90) : token].ravel().tolist()
        if not held_out.phase[token]:
            continue
        is_full, count = -1 not in slots, 0
        for layer, wanted in enumerate(flat[token].tolist()):
            for expert in [expert for expert in wanted if expert not in slots]:
                count += 1
                free = [slot for slot, owner in enumerate(slots) if owner not in wanted]
                slots[min(free, key=lambda slot: last_use.get(slots[slot], -1))] = expert
            last_use |= dict.fromkeys(wanted, token * LAYERS + layer)
            rare += [expert not in before for expert in wanted]
        missed += [count] if is_full else []
    assert found.num_misses[45] == pytest.approx(np.mean(missed))
    assert found.num_misses[25] > found.num_misses[45] > 0
    assert found.rare_share == pytest.approx(np.mean(rare)) and 0 < found.rare_share < 0.2


def test_counts_by_hand() -> None:
    learned, trace = spoken(7, sequences=8), spoken(8, sequences=2)
    past, coming = Sequences.of(learned), Sequences.of(trace)
    rates = past.popularity()
    assert rates.sum() == pytest.approx(LAYERS * TOP_K)
    flat = trace.experts + EXPERTS * np.arange(LAYERS)[:, None]
    counts = np.concatenate([block for _, block in Decayed(rates, coming, 8.0).blocks()])
    last = np.concatenate([block for _, block in Persistence(rates, coming).blocks()])
    mean = np.concatenate([block for _, block in Popularity(rates, coming).blocks()])
    expected = rates
    for token in range(len(trace)):
        if token % 40 == 0:
            expected = rates
        else:
            expected = expected * 2 ** (-1 / 8)
            expected[flat[token - 1].ravel()] += 1 - 2 ** (-1 / 8)
            assert set(np.argsort(-last[token, 0])[:6].tolist()) == set(flat[token - 1].ravel())
        np.testing.assert_allclose(counts[token, 0], expected, rtol=1e-4)
        np.testing.assert_allclose(counts[token, 3], 4 * expected, rtol=1e-4)
        np.testing.assert_allclose(mean[token, 2], 2 * rates, rtol=1e-6)


def test_the_token_table_by_hand() -> None:
    learned, trace = spoken(9, sequences=8), spoken(10, sequences=1)
    assert learned.token_ids is not None and trace.token_ids is not None
    past = Sequences.of(learned)
    table = np.concatenate(
        [block for _, block in TokenTable(past, Sequences.of(trace), 2.0).blocks()]
    )
    for w, window in enumerate(WINDOWS):
        width = window[1] - window[0] + 1
        seen: dict[int, list[Counter[int]]] = defaultdict(list)
        for token in np.flatnonzero(learned.phase):
            counted = uses(learned, int(token), window)
            if counted is not None:
                seen[int(learned.token_ids[token])].append(counted)
        for token in range(len(trace)):
            behind = seen[int(trace.token_ids[token])]
            total: Counter[int] = sum(behind, Counter())
            expected = [
                (total[e] + 2 * width * past.popularity()[e]) / (len(behind) + 2)
                for e in range(LAYERS * EXPERTS)
            ]
            np.testing.assert_allclose(table[token, w], expected, rtol=1e-4)


def test_without_token_ids() -> None:
    learned, held_out = spoken(11), spoken(12)
    bare = [
        Trace("x", "none", EXPERTS, t.experts, t.sequence, t.phase) for t in (learned, held_out)
    ]
    names = [f.name for f in forecasts_by_counting(*map(Sequences.of, bare), 5)]
    assert len(names) == 3 and names[:2] == ["popularity", "persistence"]


def test_tables() -> None:
    found = recall(spoken(0), spoken(1), None)
    page = "\n".join(recall_tables(found))
    assert page.count("\n| popularity") == 2 and "step 1: @2/5/4" in page
    facts = recall_facts(found)
    assert facts["num_tokens"] == 108
    assert [s["forecast"] for s in facts["scores"]] == [s.forecast for s in found.scores]  # type: ignore[attr-defined]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one trace the last sequences are held out, as `seqmoe train` does it."""
    whole, predictor = written_trace(20, 30), random_predictor(small_shape())
    learned, held_out = divide(whole)
    files = [str(tmp_path / name) for name in ("whole", "learned", "held out", "predictor")]
    for trace, file in zip((whole, learned, held_out), files, strict=False):
        trace.save(Path(file))
    StoredPredictor(predictor, {}).save(Path(files[3]))
    flags = ["--predictor", files[3]]
    pages = []
    for argv in ([files[0], *flags], [files[1], files[2], *flags]):
        assert main(argv) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] and pages[0].count("\n| predictor") == 2
    assert main([files[0], "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["scores"]) == 5
    assert main([files[0], str(tmp_path / "none")]) == 1
