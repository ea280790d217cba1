from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from seqmoe_cli.errors import CheckpointError, UsageError
from seqmoe_cli.settings import SamplingParams
from seqmoe_cli.text.sampling import (
    KNOBS,
    SamplingSettings,
    check_flags,
    checkpoint_settings,
)


def _checkpoint(folder: Path, **config: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def test_flags_over_checkpoint_over_defaults(tmp_path: Path) -> None:
    folder = _checkpoint(
        tmp_path, temperature=0.6, top_k=20, repetition_penalty=1.05, eos_token_id=3, min_p=None
    )
    settings = SamplingSettings({"top-k": 5, "seed": 7, "temp": None}, checkpoint_settings(folder))
    assert settings.params == SamplingParams(temperature=0.6, top_k=5, repeat_penalty=1.05, seed=7)
    origins = {name: origin for name, _, origin in settings.rows()}
    assert origins["temp"] == origins["repeat-penalty"] == "generation_config.json"
    assert origins["top-k"] == origins["seed"] == "flag"
    assert origins["min-p"] == origins["top-p"] == "default"


def test_without_anything_the_defaults_hold(tmp_path: Path) -> None:
    assert SamplingSettings({}, checkpoint_settings(tmp_path)).params == SamplingParams()
    assert {knob.field for knob in KNOBS} == set(SamplingParams.__dataclass_fields__)


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, do_sample=False, temperature=0.6)
    assert SamplingSettings({}, checkpoint_settings(folder)).params.temperature == 0
    assert SamplingSettings({"temp": 0.5}, checkpoint_settings(folder)).params.temperature == 0.5


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", "hot"), ("temperature", -1), ("top_k", 2.5), ("top_p", 2), ("top_k", True)],
)
def test_bad_values_in_the_checkpoint_are_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key} "):
        checkpoint_settings(_checkpoint(tmp_path, **{key: value}))
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json holds no JSON object"):
        checkpoint_settings(tmp_path)


@pytest.mark.parametrize("name", [knob.name for knob in KNOBS])
def test_absurd_flags_are_usage_errors(name: str) -> None:
    for value in (math.nan, math.inf, -1, -0.5, 1e30):
        with pytest.raises(UsageError, match=rf"^--{name} ") as caught:
            check_flags({name: value})
        assert " from " in caught.value.hint
    check_flags({name: 1})
    check_flags({name: None})


def test_set() -> None:
    settings = SamplingSettings({}, {})
    settings.set("temp", "0.25")
    settings.set("seed", "12")
    assert (settings.params.temperature, settings.params.seed) == (0.25, 12)
    assert ("temp", "0.25", "/set") in settings.rows()
    settings.set("seed", "random")
    assert settings.params.seed is None and settings.text("seed") == "random"
    for name, text in (("temp", "warm"), ("top-k", "1.5"), ("top-p", "0"), ("temp", "nan")):
        with pytest.raises(UsageError, match=f"/set {name} {text}"):
            settings.set(name, text)
    assert settings.params.temperature == 0.25
