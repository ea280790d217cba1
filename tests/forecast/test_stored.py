"""A stored predictor says what it said before, and what is no predictor is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from seqmoe_cli.errors import SeqmoeError
from seqmoe_cli.forecast.corpus import Corpus
from seqmoe_cli.forecast.stored import StoredPredictor, open_predictor, round_weights
from seqmoe_weights.attachment import from_bytes, to_bytes
from tests.forecast.predictors import random_predictor, small_shape
from tests.traces import written_trace

CPU = torch.device("cpu")


def test_it_says_the_same_again(tmp_path: Path) -> None:
    predictor = random_predictor(small_shape())
    round_weights(predictor)
    file = tmp_path / "p"
    num_bytes = StoredPredictor(predictor, {"num_tokens": 7}).save(file)
    assert num_bytes == file.stat().st_size
    again = open_predictor(file, CPU)
    assert again.facts == {"num_tokens": 7} and again.predictor.shape == predictor.shape
    inputs = Corpus(written_trace(1, 20), CPU).inputs(torch.arange(20)[None])
    with torch.no_grad():
        one, _ = predictor(inputs, predictor.start(1))
        two, _ = again.predictor(inputs, predictor.start(1))
    assert torch.equal(one, two)


def test_older_ones_say_that_they_read_no_hidden_states(tmp_path: Path) -> None:
    file, shape = tmp_path / "p", small_shape()
    StoredPredictor(random_predictor(shape), {}).save(file)
    tensors, metadata = from_bytes(file.read_bytes(), file)
    older = json.dumps(shape.as_dict() | {"hidden_rank": 0})
    file.write_bytes(to_bytes(tensors, metadata | {"shape": older}))
    assert open_predictor(file, CPU).predictor.shape == shape


def test_it_knows_its_weights() -> None:
    """What was stored without them, or is asked about others that are not known, is accepted."""
    predictor = random_predictor(small_shape())
    facts = {"model": "mine", "weights_sha256": "a"}
    StoredPredictor(predictor, facts).check_model("mine", "a")
    StoredPredictor(predictor, facts).check_model("random", None)
    StoredPredictor(predictor, {}).check_model("yours", "b")
    with pytest.raises(SeqmoeError, match=r"weights of mine, .* not those of yours") as refused:
        StoredPredictor(predictor, facts).check_model("yours", "b")
    assert "seqmoe train" in refused.value.hint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "not written by seqmoe"),
        ({"format_version": "2"}, "format version 2"),
        ({"shape": "{}"}, "sizes"),
        ({"shape": '{"hidden_rank": 8}'}, "reads hidden states"),
        ({"facts": "{"}, "of no use"),
        ({"facts": "[]"}, "no object"),
    ],
)
def test_others_are_refused(tmp_path: Path, change: dict[str, str], words: str) -> None:
    file = tmp_path / "p"
    StoredPredictor(random_predictor(small_shape()), {}).save(file)
    tensors, metadata = from_bytes(file.read_bytes(), file)
    file.write_bytes(to_bytes(tensors, metadata | change))
    with pytest.raises(SeqmoeError, match=words) as refused:
        open_predictor(file, CPU)
    assert refused.value.hint and str(file) in refused.value.message
    del tensors["base"]
    file.write_bytes(to_bytes(tensors, metadata))
    with pytest.raises(SeqmoeError, match="lacks weights"):
        open_predictor(file, CPU)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(SeqmoeError, match="no predictor"):
        open_predictor(file, CPU)
