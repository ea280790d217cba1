"""The soak itself: quiet on an engine that is right, loud on one that is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.agreement import Violation
from benchmarks.conversations import Conversations
from benchmarks.soak import MOST_GROWTH, Usage, leaks, open_engines
from seqmoe_cli.settings import EngineOptions, PoolSize
from tests.checkpoints import packed_model

Start = Callable[[int], Conversations]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_model(tmp_path_factory.mktemp("soak") / "model", "qwen3_moe")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["off", "lookahead"])
def start(packed: Path, device: str, request: pytest.FixtureRequest) -> Iterator[Start]:
    """`start(seed)`: conversations that have not begun."""
    options = EngineOptions(
        PoolSize.parse("30%"), device, "float32", 256, verify=True, prefetch=request.param
    )
    engine, reference = open_engines(packed, options)
    yield lambda seed: Conversations(packed, engine, reference, seed)
    reference.close()
    engine.close()


def test_an_engine_that_is_right(start: Start) -> None:
    num_moves = 40
    talk = start(1)
    done = itertools.count()
    record = soak.soak(talk, lambda: next(done) / num_moves, lambda line: None)
    assert record["faults"] == [] and record["ok"]
    counts = record["counts"]
    assert (
        sum(counts[move.__name__] for move in talk._moves if move.__name__ in counts) == num_moves
    )
    for what in ("talk", "regenerate", "undo", "compare_continued", "ended by interrupted"):
        assert counts[what] > 0, what
    assert counts["dropped exchanges"] > 0  # the context was too small for all of it
    assert record["after_warm_up"]["rss_mib"] > 0
    assert record["most_wrong_rows"] < 1e-3


def test_a_kv_state_that_is_not_what_was_said_is_found(start: Start) -> None:
    talk = start(2)
    talk.talk()
    talk.engine.kv.values[1, 4:12] *= 1.5
    with pytest.raises(Violation):
        talk.compare_continued()


def test_another_history_than_the_one_on_the_screen_is_found(start: Start) -> None:
    talk = start(3)
    talk.talk()
    talk.session.exchanges[-1].answer += "."
    with pytest.raises(Violation, match="history"):
        talk.talk()
    talk = start(3)
    talk.talk()
    talk.engine.kv.token_ids[3] += 1
    talk.engine.given = []
    with pytest.raises(Violation, match="was not said"):
        talk._check_state()


def test_a_stream_that_nobody_begins_is_no_answer(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = start(4)
    talk.talk()
    talk.paste_too_much()
    monkeypatch.setattr(talk.random, "randint", lambda low, high: 0)
    talk.leave()
    assert talk.engine.asked is None and talk.engine.token_ids


def test_what_is_a_leak() -> None:
    before = Usage(100.0, 10.0, 20.0, 7, 3)
    assert leaks(before, before) == []
    assert leaks(before, Usage(*map(sum, zip(before, MOST_GROWTH, strict=True)))) == []
    for field in Usage._fields:
        most = getattr(MOST_GROWTH, field)
        grown = before._replace(**{field: getattr(before, field) + most + 1})
        (line,) = leaks(before, grown)
        assert line.startswith(field)


def test_a_violation_is_recorded(start: Start) -> None:
    talk = start(4)

    def going() -> float:
        if talk.num_moves == 3:
            talk.history.append(talk.history[-1] if talk.history else ("a", "b"))
        return talk.num_moves / 50

    record = soak.soak(talk, going, lambda line: None)
    assert not record["ok"]
    assert record["faults"][0].startswith("move ")
