"""The predictor in a packed model: sealed, replaced as a whole, refused when damaged, and kept when
the model is converted again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from seqmoe_weights.attachment import attach_predictor
from seqmoe_weights.convert import convert
from seqmoe_weights.errors import PackedModelError
from seqmoe_weights.packed import PackedModel

FACTS = {"format": "x"}


@pytest.fixture
def model(packed: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed("qwen3_moe"), tmp_path / "model"))


def predictors(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("predictor*"))


def test_it_comes_and_is_replaced(model: Path) -> None:
    assert PackedModel.open(model).predictor is None
    with pytest.raises(PackedModelError, match="has no predictor"):
        PackedModel.open(model).load_predictor()
    first = attach_predictor(model, {"a": torch.arange(5.0)}, FACTS)
    opened = PackedModel.open(model)
    assert opened.predictor == first and predictors(model) == [first]
    tensors, metadata = opened.load_predictor()
    assert tensors["a"].tolist() == [0, 1, 2, 3, 4] and metadata == FACTS
    second = attach_predictor(model, {"a": torch.zeros(2, dtype=torch.bfloat16)}, FACTS)
    assert second != first and predictors(model) == [second]
    opened = PackedModel.open(model)
    assert opened.load_predictor()[0]["a"].dtype == torch.bfloat16
    opened.verify()


def test_interrupted_before_the_manifest(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = attach_predictor(model, {"a": torch.ones(3)}, FACTS)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("seqmoe_weights.attachment.write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        attach_predictor(model, {"a": torch.zeros(3)}, FACTS)
    monkeypatch.undo()
    assert PackedModel.open(model).load_predictor()[0]["a"].tolist() == [1, 1, 1]
    assert len(predictors(model)) == 2
    attach_predictor(model, {"a": torch.ones(3)}, FACTS)
    assert predictors(model) == [first]


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_damage_is_found_when_it_is_read(model: Path, damage: str) -> None:
    file = model / attach_predictor(model, {"a": torch.ones(300)}, FACTS)
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flipped" else data[:-4])
    opened = PackedModel.open(model)  # whoever needs no predictor is not disturbed
    words = "is missing" if damage == "gone" else "is damaged"
    with pytest.raises(PackedModelError, match=words) as refused:
        opened.load_predictor()
    assert refused.value.hint == "train it again: seqmoe train MODEL"
    with pytest.raises(PackedModelError):
        opened.verify()
    attach_predictor(model, {"a": torch.ones(3)}, FACTS)
    PackedModel.open(model).verify()


def test_converting_again_keeps_it(model: Path, checkpoint: Callable[..., Path]) -> None:
    source = checkpoint("qwen3_moe")
    name = attach_predictor(model, {"a": torch.ones(3)}, FACTS)
    assert convert(source, model, "keep", False, None) == "unchanged"
    assert PackedModel.open(model).predictor == name
    (model / "config.json").write_text("{}")
    assert convert(source, model, "keep", False, None) == "repaired"
    assert PackedModel.open(model).load_predictor()[0]["a"].tolist() == [1, 1, 1]
    convert(source, model, "keep", True, None)  # --force: perhaps other weights
    assert PackedModel.open(model).predictor is None and predictors(model) == []
