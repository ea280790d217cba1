"""A trained predictor as a file: alone, or within a packed model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqmoe_cli.errors import PackedModelError, SeqmoeError
from seqmoe_cli.forecast.predictions import check_trace
from seqmoe_cli.forecast.predictor import FORMAT, FORMAT_VERSION, Predictor, PredictorShape
from seqmoe_cli.forecast.trace import Trace
from seqmoe_weights.attachment import attach_predictor, from_bytes, to_bytes
from seqmoe_weights.files import write_file
from seqmoe_weights.packed import PackedModel

_EXACT = ("base", "by_counts")  # few, and added to the logits as they are
_HINT = "train it again: seqmoe train MODEL"


@dataclass(frozen=True)
class StoredPredictor:
    """`facts` say what it was trained for and on and what came of it: numbers, texts, lists."""

    predictor: Predictor
    facts: dict[str, Any]

    def check_model(self, of: str, weights_sha256: str | None) -> None:
        """Raise `SeqmoeError` if it was trained for other weights; where either is not known, there
        is nothing to compare. `of` names their model."""
        trained = self.facts.get("weights_sha256")
        if None not in (trained, weights_sha256) and trained != weights_sha256:
            raise SeqmoeError(
                f"the predictor was trained for the weights of {self.facts.get('model')}, which "
                f"are not those of {of}",
                "train one for them: seqmoe train MODEL",
            )

    def check_trace(self, trace: Trace) -> None:
        """Raise `SeqmoeError` for a trace of other weights, or one that it cannot forecast."""
        self.check_model(f"{trace.model} in the trace", trace.weights_sha256)
        check_trace(self.predictor, trace)

    def save(self, path: Path) -> int:
        """Write a file, whole or not at all, and return its size in bytes."""
        data = to_bytes(self._tensors(), self._metadata())
        write_file(path, data)
        return len(data)

    def attach(self, folder: Path) -> None:
        """Put it into a packed model, in the place of an earlier one."""
        attach_predictor(folder, self._tensors(), self._metadata())

    def _tensors(self) -> dict[str, Tensor]:
        return {
            name: tensor.detach().cpu().to(torch.float32 if name in _EXACT else torch.bfloat16)
            for name, tensor in self.predictor.state_dict().items()
        }

    def _metadata(self) -> dict[str, str]:
        return {
            "format": FORMAT,
            "format_version": str(FORMAT_VERSION),
            "shape": json.dumps(self.predictor.shape.as_dict()),
            "facts": json.dumps(self.facts),
        }


@torch.no_grad()
def round_weights(predictor: Predictor) -> None:
    """Make the weights what they are once they have been stored."""
    for name, weight in predictor.named_parameters():
        if name not in _EXACT:
            weight.copy_(weight.bfloat16())


def open_predictor(source: Path, device: torch.device) -> StoredPredictor:
    """That of a packed model, or of a file; float32 on `device`. Raises `PackedModelError` when
    there is none, or it is damaged or of another version."""
    if source.is_dir():
        tensors, metadata = PackedModel.open(source).load_predictor()
    else:
        try:
            tensors, metadata = from_bytes(source.read_bytes(), source)
        except OSError as error:
            raise SeqmoeError(
                f"cannot read {source}: {error.strerror or error}", "give a model or a predictor"
            ) from error
    return _predictor(source, tensors, metadata, device)


def predictor_facts(model: PackedModel) -> dict[str, Any] | None:
    """What is known of a model's predictor without building it; None without one."""
    if model.predictor is None:
        return None
    tensors, metadata = model.load_predictor()
    shape, facts = _head(model.path, metadata)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return {"bytes": num_bytes, "shape": shape.as_dict(), **facts}


def _predictor(
    source: Path, tensors: dict[str, Tensor], metadata: dict[str, str], device: torch.device
) -> StoredPredictor:
    shape, facts = _head(source, metadata)
    predictor = Predictor(shape)
    try:
        predictor.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise PackedModelError(f"the predictor of {source} lacks weights", _HINT) from error
    return StoredPredictor(predictor.to(device).eval(), facts)


def _head(source: Path, metadata: dict[str, str]) -> tuple[PredictorShape, dict[str, Any]]:
    try:
        if metadata.get("format") != FORMAT:
            raise ValueError("it was not written by seqmoe")
        if metadata["format_version"] != str(FORMAT_VERSION):
            raise ValueError(f"format version {metadata['format_version']} is not supported")
        facts = json.loads(metadata["facts"])
        if not isinstance(facts, dict):
            raise ValueError("its facts are no object")
        return PredictorShape.from_dict(json.loads(metadata["shape"])), facts
    except (KeyError, ValueError, TypeError) as error:
        raise PackedModelError(f"the predictor of {source} is of no use: {error}", _HINT) from error
