"""The simulator with a trained predictor: its forecast, and the predictors that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqmoe_cli.forecast.predictions import Predictions
from seqmoe_cli.forecast.stored import StoredPredictor
from seqmoe_cli.forecast.trace import DECODE, Trace
from seqmoe_cli.residency.policies import ONE, WINDOWS
from seqmoe_weights.packed import PackedModel
from tests.forecast.predictors import random_predictor, small_shape
from tests.traces import EXPERTS, LAYERS, written_trace
from tools.simulator.__main__ import main
from tools.simulator.forecasts import Predicted

FACTS = {"model": "mine", "weights_sha256": "a" * 64}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    replace(written_trace(3, 40), weights_sha256="a" * 64).save(tmp_path / "trace")
    return tmp_path / "trace"


@pytest.fixture
def predictor(tmp_path: Path) -> Path:
    StoredPredictor(random_predictor(small_shape()), FACTS).save(tmp_path / "p")
    return tmp_path / "p"


def by_predictor(trace: Path, predictor: Path) -> list[str]:
    return [str(trace), "--forecast", "predictor", "--predictor", str(predictor)]


def test_forecasts_of_replayed_tokens() -> None:
    """They are those of the whole trace, prompts included, at the tokens that are replayed."""
    trace = written_trace(3, 80)
    predictions = Predictions(random_predictor(small_shape()), trace)
    whole = np.concatenate([block for _, block in predictions.blocks()])
    assert whole.shape == (240, len(WINDOWS), LAYERS * EXPERTS)
    tokens = np.flatnonzero(trace.phase == DECODE)
    forecast = Predicted(predictions.blocks(), tokens)
    for step, token in enumerate(tokens):
        np.testing.assert_array_equal(forecast(step), np.rint(whole[token] * ONE))


def test_eviction_follows_the_predictor(
    trace: Path, predictor: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["--pool", "50%", "--policy", "lru,forecast", "-o", "json"]
    assert main([*by_predictor(trace, predictor), *usual]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["forecast"] for row in rows] == ["", "predictor"]
    assert main([str(trace), *usual, "--forecast", "none"]) == 0
    none = json.loads(capsys.readouterr().out)
    assert none[0] == rows[0] and none[1]["num_loads"] != rows[1]["num_loads"]


def test_what_does_not_fit_is_refused_before_the_first_row(
    trace: Path, predictor: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = tmp_path / "strange"
    replace(Trace.load(trace), weights_sha256="0" * 64).save(strange)
    for argv, words in (
        ([*by_predictor(trace, predictor), "qwen3"], "48 layers of 128 experts"),
        (by_predictor(strange, predictor), "the weights of"),
    ):
        assert main(argv) == 1
        out, err = capsys.readouterr()
        assert out == "" and words in err and len(err.splitlines()) == 2


def test_the_predictor_of_a_damaged_model_is_refused(
    packed: Callable[..., Path], trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = packed("mixtral")
    StoredPredictor(random_predictor(small_shape()), {}).attach(model)
    name = PackedModel.open(model).predictor
    assert name is not None
    data = bytearray((model / name).read_bytes())
    data[-1] ^= 1
    (model / name).write_bytes(data)
    assert main(by_predictor(trace, model)) == 1
    out, err = capsys.readouterr()
    assert out == "" and name in err and len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--forecast", "predictor"], "belong together"),
        (["--predictor", "x"], "belong together"),
        (["--forecast", "none", "--predictor", "x"], "belong together"),
        (["--forecast", "predictor", "--predictor", "x", "--policy", "lru"], "would not be used"),
    ],
)
def test_wrong_flags(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qwen3", *argv]) == 2
    assert words in capsys.readouterr().err
