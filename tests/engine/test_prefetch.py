"""Prefetch changes no bit: not when it is late, refused, out of order, dead or wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from seqmoe_cli.residency import prefetch as prefetch_module
from seqmoe_cli.residency.prefetch import LEAST_USE, TUNE_EVERY
from seqmoe_cli.residency.replayed import ReplayedRouting
from seqmoe_cli.residency.stats import StepStats
from seqmoe_cli.residency.switch import Lengths, PrefetchVerdict, Switch
from seqmoe_kernels import Request
from seqmoe_kernels.state import CERTAIN, LAYER_NS, LEAST, PATIENCE_NS, PREFETCHES, READY
from tests.checkpoints import packed_model
from tests.engine.conversations import SHAPE, open_engine, say
from tests.engine.troubled_copies import Troubled, deadly, late, lost, swapped

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_model(tmp_path_factory.mktemp("prefetch") / "model", "qwen3_moe", **SHAPE)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(packed: Path, device: str) -> list[int | None]:
    engine = open_engine(packed, device, prefetch="off")
    tokens, stats = say(engine)
    assert stats.total.prefetched_bytes == 0 and engine.prefetch is None
    engine.close()
    return tokens


@pytest.mark.parametrize("trouble", [None, late, swapped, lost, deadly])
@pytest.mark.parametrize("patience_s", [0.0, 0.01])
def test_the_same_tokens_whatever_the_thread_does(
    packed: Path,
    device: str,
    plain: list[int | None],
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[Troubled, Request], bool] | None,
    patience_s: float,
) -> None:
    if trouble is not None:
        kind = type("Copier", (Troubled,), {"trouble": trouble})
        monkeypatch.setattr(prefetch_module, "HostCopier", kind)
        monkeypatch.setattr(prefetch_module, "DmaCopier", kind)
    engine = open_engine(packed, device, by="thread")
    assert engine.prefetch is not None and engine.prefetch.thread is not None
    engine.prefetch.flights.rules[PATIENCE_NS] = int(patience_s * 1e9)
    prefetched_bytes = 0  # most in the first turn: steps that wait long ask for sure things alone
    for _ in range(2):
        tokens, stats = say(engine)
        assert tokens == plain
        prefetched_bytes += stats.total.prefetched_bytes
    assert prefetched_bytes > 0 or trouble in (late, lost, deadly)
    assert bool(engine.fallbacks) == (trouble is deadly)
    if trouble is deadly:
        assert "prefetch has stopped (OSError: no more)" in engine.fallbacks[0]
        assert engine.pool.flights is None and engine.prefetch.status == "stopped"
    engine.close()


def test_wrong_names_cost_bytes_and_nothing_else(
    packed: Path, device: str, plain: list[int | None]
) -> None:
    """Random experts are predicted; the router goes on choosing."""
    engine = open_engine(packed, device)
    assert engine.prefetch is not None
    gen = torch.Generator().manual_seed(1)
    predicted = torch.rand(7, 6, 4, 12, generator=gen).argsort(-1)[..., :2]
    routing = ReplayedRouting(torch.zeros(7, 6, 2), engine.device, predicted)
    engine.prefetch.predicted = routing.predicted
    tokens, stats = say(engine)
    assert tokens == plain and stats.total.prefetched_bytes > 0
    engine.close()


def test_wrong_expectations_cost_bytes_and_nothing_else(
    packed: Path, device: str, plain: list[int | None]
) -> None:
    """Look-ahead sees nothing, so that all copies come from a forecast, which is random."""
    engine = open_engine(packed, device)
    assert engine.prefetch is not None
    none, expected = torch.full((7, 6, 4, 2), -1), torch.rand(7, 6 * 12)
    routing = ReplayedRouting(torch.zeros(7, 6, 2), engine.device, none, expected)
    engine.prefetch.predicted = routing.predicted
    engine.prefetch.step_forecast = routing.step_forecast
    tokens, stats = say(engine)
    assert tokens == plain and stats.total.prefetched_bytes > 0
    engine.close()


@pytest.mark.parametrize("pool", ["6slots", "9slots", "45%", "all"])
def test_the_same_logits_at_every_pool_size(packed: Path, device: str, pool: str) -> None:
    ids = [i * 11 % 300 for i in range(300)]
    found = []
    for prefetch in ("off", "lookahead"):
        engine = open_engine(packed, device, pool, prefetch)
        tokens, _ = say(engine)
        engine.reset_pool()
        found.append((tokens, engine.log_likelihoods(ids), say(engine)[0]))
        engine.close()
    assert found[0][0] == found[1][0] == found[0][2] == found[1][2]
    assert torch.equal(found[0][1], found[1][1])


def test_prefetch_turns_misses_into_hits(packed: Path, device: str) -> None:
    """With a thread that has all the time it needs: waited for, every copy is a hit or late."""
    counts = []
    for prefetch in ("off", "lookahead"):
        engine = open_engine(packed, device, "35%", prefetch)
        if engine.prefetch is not None:
            engine.prefetch.flights.rules[PATIENCE_NS] = 10**9
        _, stats = say(engine)
        counts.append(stats)
        if engine.prefetch is not None:
            accuracy = engine.prefetch.accuracy()
        engine.close()
    off, on = counts
    assert on.decode.prefetch_hits + on.decode.prefetches_late > 0
    assert on.decode.fetched_bytes < off.decode.fetched_bytes
    assert on.decode.prefetches_dropped == 0
    for missing, predicted, right in accuracy:
        assert 0 < right <= min(missing, predicted)


def test_a_pool_too_small_for_prefetch_says_so(packed: Path, device: str) -> None:
    engine = open_engine(packed, device, "5slots")
    assert engine.prefetch is None
    why = "--prefetch lookahead needs a pool of 6 slots, not 5: prefetch is off"
    assert engine.fallbacks == [why]
    engine.close()
    engine = open_engine(packed, device, "all")
    assert engine.prefetch is None and engine.fallbacks == []
    engine.close()


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_other_families_look_ahead_too(tmp_path: Path, device: str, family: str) -> None:
    packed = packed_model(tmp_path / "model", family, **SHAPE)
    texts = []
    for prefetch in ("off", "lookahead"):
        engine = open_engine(packed, device, prefetch=prefetch)
        texts.append(say(engine)[0])
        if engine.prefetch is not None:
            assert engine.prefetch.accuracy()[0][2] > 0
        engine.close()
    assert texts[0] == texts[1]


def test_the_time_of_a_layer_is_learned(packed: Path, device: str) -> None:
    engine = open_engine(packed, device)
    assert engine.prefetch is not None
    before = int(engine.prefetch.flights.rules[LAYER_NS])
    _, stats = say(engine)
    learned = int(engine.prefetch.flights.rules[LAYER_NS])
    assert 0 < learned < before
    assert learned * 6 * stats.decode.num_tokens < 5e9 * stats.decode.step_s
    engine.close()


def test_the_busier_the_link_the_surer_a_use_must_be(packed: Path) -> None:
    """A layer takes the time of its computing; the first steps, which compile, do not count."""
    engine = open_engine(packed, "cpu")
    prefetch = engine.prefetch
    assert prefetch is not None
    rules = prefetch.flights.rules
    for _ in range(Lengths().settle):
        prefetch.observe(StepStats("decode", 1, misses=9, stall_s=1.0, step_s=60.0))
    for stall_s, layer_s, share in ((9e-3, 1e-3, 0.6), (0.0, 1e-3, LEAST_USE), (0.2, 0.1, 0.25)):
        for _ in range(20 * TUNE_EVERY):
            step_s = stall_s + 6 * layer_s
            prefetch.observe(StepStats("decode", 1, misses=9, stall_s=stall_s, step_s=step_s))
        assert int(rules[LAYER_NS]) == pytest.approx(1e9 * layer_s, rel=1e-3)
        assert int(rules[LEAST]) == pytest.approx(share * CERTAIN, rel=1e-3)
    engine.close()


def test_the_same_tokens_with_prefetch_now_and_then(
    packed: Path, device: str, plain: list[int | None]
) -> None:
    """Off in the middle of answers and on again, with copies under way: nothing is asked for while
    it is off, and what has landed meanwhile is taken note of."""
    engine = open_engine(packed, device)
    prefetch = engine.prefetch
    assert prefetch is not None
    assert say(engine)[1].decode.prefetch_rested_tokens == 0  # it is held
    prefetch.switch = Alternating(lambda on, off: PrefetchVerdict.of(on, off, 0.0))
    asked = []
    for _ in range(3):
        tokens, stats = say(engine)
        assert tokens == plain
        assert 0 < stats.decode.prefetch_rested_tokens < stats.decode.num_tokens
        asked.append(engine.pool.counters()[PREFETCHES])
        state = engine.pool.state
        ready = (state.state == READY).nonzero().flatten()
        assert torch.equal(state.slot_of[state.owner[ready].long()].long(), ready)
    assert 0 < asked[0] < asked[1] < asked[2]
    prefetch.switch = Switch(lambda on, off: PrefetchVerdict.of(on, off, 0.0))
    prefetch.switch.is_on, prefetch.switch._left = False, 10**6
    say(engine)
    before = engine.pool.counters()[PREFETCHES]
    assert say(engine)[0] == plain and engine.pool.counters()[PREFETCHES] == before
    assert prefetch.status == "comparing" and engine.fallbacks == []
    engine.close()


class Alternating(Switch[PrefetchVerdict]):
    """Changes its mind every five steps."""

    seen = 0

    def observe(self, step: StepStats, regime: str = "on") -> bool:
        self.seen += 1
        self.is_on = self.seen % 10 < 5
        return self.is_on
