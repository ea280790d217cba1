"""The kernels beside a step change no bit: not when one does not run, or never sees the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from seqmoe_cli.residency import prefetch as prefetch_module
from seqmoe_kernels.pool import lock
from tests.checkpoints import packed_model
from tests.engine.conversations import SHAPE, open_engine, say

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_model(tmp_path_factory.mktemp("handover") / "model", "qwen3_moe", **SHAPE)


def sometimes(luck: random.Random, work: Callable[[], None]) -> None:
    if luck.random() < 0.5:
        work()


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("dies", ["ask", "copy"])
def test_the_same_tokens_whatever_becomes_of_the_kernels_beside(
    packed: Path, dies: str, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them does not run in half of the steps, or, in a graph, in none."""
    without = open_engine(packed, "cuda", prefetch="off")
    expected = say(without)[0]
    without.close()
    luck, work = random.Random(3), getattr(prefetch_module.Prefetch, dies)
    trouble = sometimes if eager else lambda luck, work: None
    monkeypatch.setattr(
        prefetch_module.Prefetch, dies, lambda *parts: trouble(luck, lambda: work(*parts))
    )
    engine = open_engine(packed, "cuda", eager=eager)
    assert engine.prefetch is not None and engine.prefetch.thread is None
    for _ in range(2):
        tokens, stats = say(engine)
        assert tokens == expected
        assert (stats.total.prefetched_bytes > 0) == eager
    engine.close()


def test_kernels_that_never_see_the_end_are_told_and_misses_go_on(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU that does not run kernels beside others: they give up at once."""
    without = open_engine(packed, "cuda", prefetch="off")
    expected = say(without)[0]
    without.close()
    monkeypatch.setattr(lock, "LIMIT_NS", 0)
    engine = open_engine(packed, "cuda")
    assert engine.prefetch is not None and engine.prefetch.thread is None
    assert say(engine)[0] == expected
    assert engine.prefetch.status == "stopped" and engine.pool.flights is None
    assert ["--prefetch off" in line for line in engine.fallbacks] == [True]
    engine.close()
