"""The supported model families, one file each, named after config.json's `model_type`.

A family says how its config.json is read and, for each role that a weight has in the model, how the
tensor is called and what shape it has. All else asks by role: conversion, memory plan, decoders.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from seqmoe_kernels.formats import find_format
from seqmoe_weights.config import ModelConfig
from seqmoe_weights.errors import UnsupportedError
from seqmoe_weights.fields import Fields


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a checkpoint must hold, and its role; `layer` is None outside of the layers.

    `quantized`: an FP8 checkpoint may hold it as F8_E4M3, with `scale_spec` beside it.
    """

    name: str
    shape: tuple[int, ...]
    quantized: bool = False
    role: str = ""
    layer: int | None = None


@dataclass(frozen=True)
class Weight:
    """How a family calls the weight of a role, and its shape.

    `name` may have `{layer}` in it: then each layer has one; or `{layer}` and `{expert}`. `shape`
    are names of fields of `ModelConfig`. `quantized`: see `TensorSpec`.
    """

    name: str
    shape: tuple[str, ...]
    quantized: bool = False

    def spec(self, config: ModelConfig, role: str, layer: int = 0, expert: int = 0) -> TensorSpec:
        """The tensor of one layer and expert, as far as the name speaks of them."""
        return TensorSpec(
            self.name.format(layer=layer, expert=expert),
            tuple(getattr(config, dim) for dim in self.shape),
            self.quantized,
            role,
            layer if self.is_of_layer else None,
        )

    @property
    def is_of_layer(self) -> bool:
        return "{layer}" in self.name

    @property
    def is_of_expert(self) -> bool:
        return "{expert}" in self.name


@dataclass(frozen=True)
class Family:
    """One architecture: how it spells its config, and its weights by role.

    Roles outside of the layers are `embedding`, `final_norm` and `head`; those of an expert are
    `gate`, `up` and `down`; for those of a layer see `_common.py`. A model with tied embeddings has
    no `head`.
    """

    model_type: str
    read_config: Callable[[Fields], ModelConfig]
    weights: Mapping[str, Weight]

    def resident_tensors(self, config: ModelConfig) -> list[TensorSpec]:
        """Every tensor that is not a routed expert."""
        resident = {role: w for role, w in self.weights.items() if not w.is_of_expert}
        if config.tie_word_embeddings:
            del resident["head"]
        specs = [w.spec(config, role) for role, w in resident.items() if not w.is_of_layer]
        in_layers = [(role, weight) for role, weight in resident.items() if weight.is_of_layer]
        for layer in range(config.num_hidden_layers):
            specs += [weight.spec(config, role, layer) for role, weight in in_layers]
        return specs

    def expert_tensors(self, config: ModelConfig, layer: int, expert: int) -> dict[str, TensorSpec]:
        """The tensors of one expert, by role."""
        return {
            role: weight.spec(config, role, layer, expert)
            for role, weight in self.weights.items()
            if weight.is_of_expert
        }


_registered: dict[str, Family] = {}


def register(family: Family) -> None:
    """Make a family known that is no file of this folder. Raises `ValueError` if there is one of
    this name."""
    if family.model_type in supported_model_types():
        raise ValueError(f"there is a family {family.model_type} already")
    _registered[family.model_type] = family


def supported_model_types() -> list[str]:
    """Names of the families, sorted."""
    names = {module.name for module in pkgutil.iter_modules(__path__)}
    return sorted({name for name in names if not name.startswith("_")} | _registered.keys())


def find_family(model_type: str) -> Family:
    """The family of this name. Raises `UnsupportedError` when there is none."""
    if model_type in _registered:
        return _registered[model_type]
    if model_type not in supported_model_types():
        raise UnsupportedError(
            f"config.json: model_type {model_type!r} is not supported",
            f"supported are {', '.join(supported_model_types())}",
        )
    family = importlib.import_module(f"{__name__}.{model_type}").FAMILY
    assert isinstance(family, Family)
    return family


def read_config(config: dict[str, Any]) -> ModelConfig:
    """Read a parsed config.json, of whatever family.

    Raises `CheckpointError` for a missing or ill-typed field and `UnsupportedError`, both naming
    the field, for a value that is not implemented.
    """
    fields = Fields(config)
    return find_family(fields.text("model_type")).read_config(fields)


def scale_spec(weight: TensorSpec) -> TensorSpec:
    """The scales of an FP8 weight [out, in], one per 128x128 block: weight = value * scale."""
    rows, columns = weight.shape
    _, scale = find_format("F8_E4M3").parts(rows, columns)
    return TensorSpec(f"{weight.name}_scale_inv", scale.shape)


def held_bytes(spec: TensorSpec, config: ModelConfig, plain_bytes: int) -> int:
    """What a resident tensor takes on the device: FP8 keeps its bits and has F32 scales, all else
    takes `plain_bytes` for each element."""
    if spec.quantized and config.dense_format == "FP8":
        return math.prod(spec.shape) + 4 * math.prod(scale_spec(spec).shape)
    return math.prod(spec.shape) * plain_bytes
