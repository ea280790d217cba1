"""The supported model families, one file each, named after config.json's `model_type`.

A new family is one new file here with a `FAMILY`, and one in `seqmoe_cli/models/`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from seqmoe_weights.config import ModelConfig
from seqmoe_weights.errors import UnsupportedError
from seqmoe_weights.fields import Fields

BLOCK = 128  # rows and columns that share one FP8 scale


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a checkpoint of the family must hold.

    `quantized`: an FP8 checkpoint may hold it as F8_E4M3, with `scale_spec` beside it.
    """

    name: str
    shape: tuple[int, ...]
    quantized: bool = False


@dataclass(frozen=True)
class Family:
    """How one architecture spells its config and its tensors.

    `expert_tensors(config, layer, expert)` maps the record's parts (`gate`, `up`, `down` and, when
    `config.dense_format` is FP8, their `*_scale`) to the tensors they are made from.
    """

    model_type: str
    read_config: Callable[[dict[str, Any]], ModelConfig]
    resident_tensors: Callable[[ModelConfig], list[TensorSpec]]
    expert_tensors: Callable[[ModelConfig, int, int], dict[str, TensorSpec]]


def supported_model_types() -> list[str]:
    """Names of the families, sorted."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in names if not name.startswith("_"))


def family_of(config: dict[str, Any]) -> Family:
    """The family of a parsed config.json, by its `model_type`.

    Raises `CheckpointError` when the field is missing, `UnsupportedError` for an unknown family.
    """
    model_type = Fields(config).text("model_type")
    if model_type not in supported_model_types():
        raise UnsupportedError(
            f"config.json: model_type {model_type!r} is not supported",
            f"supported are {', '.join(supported_model_types())}",
        )
    family = importlib.import_module(f"{__name__}.{model_type}").FAMILY
    assert isinstance(family, Family)
    return family


def scale_spec(weight: TensorSpec) -> TensorSpec:
    """The scales of an FP8 weight [out, in], one per 128x128 block: weight = value * scale."""
    blocks = tuple(-(-dim // BLOCK) for dim in weight.shape)
    return TensorSpec(f"{weight.name}_scale_inv", blocks)
