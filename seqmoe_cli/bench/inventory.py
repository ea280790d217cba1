"""What a model is made of: parameters, resident tensors by group, and what a decode step reads of
it. Loads no weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open

from seqmoe_weights.config import ModelConfig
from seqmoe_weights.errors import PackedModelError
from seqmoe_weights.families import find_family, held_bytes
from seqmoe_weights.layout import DTYPE_BYTES, RecordLayout
from seqmoe_weights.manifest import RESIDENT_FILE
from seqmoe_weights.packed import PackedModel

_GROUPS = (  # the first that fits the name
    ("norm", "norms"),
    ("self_attn", "attention"),
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    ("gate.weight", "router"),
    ("", "other"),
)


@dataclass
class ResidentGroup:
    """Tensors of one kind, as stored: `dtypes` are safetensors names."""

    name: str
    tensors: int
    bytes: int
    dtypes: list[str]


@dataclass(frozen=True)
class Params:
    """Numbers of weights; scales of quantised ones do not count. `active` serve one token."""

    total: int
    active: int


def count_params(config: ModelConfig) -> Params:
    """From the shapes that the family's tensors must have."""
    specs = find_family(config.family).resident_tensors(config)
    resident = sum(math.prod(spec.shape) for spec in specs)
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    used = config.num_hidden_layers * config.num_experts_per_tok
    return Params(resident + expert * config.num_routed_experts, resident + expert * used)


def bytes_read_per_token(
    config: ModelConfig, layouts: Sequence[RecordLayout], dtype: torch.dtype, context: float
) -> int:
    """Bytes that a step at a depth of `context` tokens cannot do without: all resident tensors but
    the embedding, the experts that it uses, keys and values. Activations and the pool's bookkeeping
    are left out; resident tensors that are not FP8 are held in `dtype`."""
    resident = sum(
        held_bytes(spec, config, dtype.itemsize)
        for spec in find_family(config.family).resident_tensors(config)
        if spec.role != "embedding" or config.tie_word_embeddings  # else one row of it
    )
    parts = [part for layout in layouts for part in layout.parts if part.name != "stamp"]
    experts = config.num_experts_per_tok * sum(part.num_bytes for part in parts)
    entries = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return resident + experts + round(context * entries * dtype.itemsize)


def readable_count(number: int) -> str:
    """A number of parameters for people, in billions, or millions when it is small."""
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def resident_groups(packed: PackedModel) -> list[ResidentGroup]:
    """The resident tensors by kind, largest first, from the header of their file alone."""
    groups: dict[str, ResidentGroup] = {}
    try:
        with safe_open(packed.path / RESIDENT_FILE, "np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_slice(name)
                _add(groups, name, tensor.get_dtype(), tensor.get_shape())
    except (OSError, KeyError, SafetensorError) as error:
        raise PackedModelError(
            f"{RESIDENT_FILE} in {packed.path} is damaged: its header cannot be read",
            "run the same seqmoe convert SRC DST again: it repairs damaged files",
        ) from error
    return sorted(groups.values(), key=lambda group: -group.bytes)


def _add(groups: dict[str, ResidentGroup], name: str, dtype: str, shape: list[int]) -> None:
    kind = next(kind for mark, kind in _GROUPS if mark in name)
    group = groups.setdefault(kind, ResidentGroup(kind, 0, 0, []))
    group.tensors += 1
    group.bytes += math.prod(shape) * DTYPE_BYTES[dtype]
    group.dtypes = sorted({*group.dtypes, dtype})
