"""One answer on a real engine: what is written when it is broken off."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seqmoe_cli.chat.oneshot import OneShot, OneShotOutput, answer_once
from seqmoe_cli.chat.session import ChatOptions, Prompt
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.stats import Step
from seqmoe_cli.errors import ResourceError
from seqmoe_cli.forecast.predictor import Predictor, PredictorShape
from seqmoe_cli.forecast.stored import StoredPredictor
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_cli.text.sampling import Setting
from seqmoe_cli.text.tokenizer import Tokenizer
from seqmoe_weights.packed import PackedModel


class Disturbed:
    """The engine, and something that happens before its n-th step."""

    def __init__(self, engine: Engine, n: int, event: Callable[[], None]) -> None:
        self._engine, self._n, self._event = engine, n, event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, *args: Any, **options: Any) -> Iterator[Step]:
        if self._n == 0:
            self._event()
        for count, step in enumerate(self._engine.generate(*args, **options), 1):
            if count == self._n:
                self._event()
            yield step


def _ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def _failure() -> None:
    raise ResourceError("no more memory", "lower --pool")


def _request(tokenizer: Tokenizer, as_json: bool) -> OneShot:
    options = ChatOptions(Setting(20, "flag"), stats=False)
    prompt = Prompt(tokenizer.encode("once upon a time"))
    return OneShot("tiny", prompt, SamplingParams(temperature=0), options, True, as_json)


@pytest.fixture
def whole(engine: Engine, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> Any:
    """The answer when nothing happens, as JSON."""
    engine.reset_kv()
    assert answer_once(engine, tokenizer, _request(tokenizer, True)) == 0
    engine.reset_kv()
    return json.loads(capsys.readouterr().out)


def test_interrupted(
    engine: Engine, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], whole: Any
) -> None:
    disturbed: Any = Disturbed(engine, 6, _ctrl_c)
    assert answer_once(disturbed, tokenizer, _request(tokenizer, True)) == 130
    part = json.loads(capsys.readouterr().out)
    assert part["finish_reason"] == "interrupted" and "error" not in part
    assert part["token_ids"] == whole["token_ids"][:6] and part["completion_tokens"] == 6
    assert whole["text"].startswith(part["text"]) and part["text"]
    assert answer_once(disturbed, tokenizer, _request(tokenizer, False)) == 130
    assert capsys.readouterr() == (part["text"] + "\n", "")
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C is itself again
        _ctrl_c()


def test_interrupted_before_the_answer_began(
    engine: Engine, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    disturbed: Any = Disturbed(engine, 0, _ctrl_c)
    assert answer_once(disturbed, tokenizer, _request(tokenizer, False)) == 130
    assert capsys.readouterr() == ("", "")
    assert answer_once(disturbed, tokenizer, _request(tokenizer, True)) == 130
    part = json.loads(capsys.readouterr().out)
    assert (part["text"], part["token_ids"], part["finish_reason"]) == ("", [], "interrupted")


def test_refused_half_way(
    engine: Engine, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], whole: Any
) -> None:
    disturbed: Any = Disturbed(engine, 6, _failure)
    with pytest.raises(ResourceError):
        answer_once(disturbed, tokenizer, _request(tokenizer, True))
    part = json.loads(capsys.readouterr().out)
    assert part["error"] == "no more memory" and part["finish_reason"] == "interrupted"
    assert part["token_ids"] == whole["token_ids"][:5]
    with pytest.raises(ResourceError):
        answer_once(disturbed, tokenizer, _request(tokenizer, False))
    assert capsys.readouterr().out == part["text"] + "\n"


def test_refused_before_it_began(
    engine: Engine, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    disturbed: Any = Disturbed(engine, 0, _failure)
    for as_json in (False, True):
        with pytest.raises(ResourceError):
            answer_once(disturbed, tokenizer, _request(tokenizer, as_json))
        assert capsys.readouterr() == ("", "")


def test_what_a_forecast_saved(
    endless: Path,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    whole: Any,
) -> None:
    config = PackedModel.open(endless).config
    sizes = (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)
    shape = PredictorShape(*sizes, config.vocab_size, token_rank=4, width=16)
    StoredPredictor(Predictor(shape), {}).save(tmp_path / "predictor")
    pool, source = PoolSize.parse("12slots"), tmp_path / "predictor"
    options = EngineOptions(pool, "cpu", ctx_size=256, policy="forecast", predictor=source)
    foreseeing = Engine.open(endless, options)
    assert foreseeing.eviction is not None
    for is_on in (True, False):
        foreseeing.reset_kv()
        foreseeing.eviction.switch.is_on = is_on
        foreseeing.eviction.switch.rests, foreseeing.eviction.switch._left = not is_on, 99
        assert answer_once(foreseeing, tokenizer, _request(tokenizer, True)) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["eviction_status"] == ("on" if is_on else "resting")
        assert said["eviction_rested_tokens"] == (0 if is_on else 19)
        assert (said["eviction_saved_misses"] is not None) == is_on
        assert said["eviction_saved"] is None  # nothing was judged yet
    foreseeing.close()
    assert (whole["eviction_status"], whole["eviction_saved_misses"]) == ("off", None)


def test_one_newline_at_the_end() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")  # whatever the locale says
    out = OneShotOutput(stream)
    written = []
    for piece in ("\n", " é", "\n\n", "", "\n😀", "\t", "\n"):
        out.write(piece)
        written.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    assert written == ["", *["\n é"] * 3, "\n é\n\n\n😀", *["\n é\n\n\n😀\t"] * 2]
    out.line("")
    assert stream.buffer.getvalue().decode() == "\n é\n\n\n😀\t\n"  # type: ignore[attr-defined]
