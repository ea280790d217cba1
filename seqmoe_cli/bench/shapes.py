"""Shapes of models that `seqmoe bench --shape` makes of random weights: no file, no download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from seqmoe_cli.errors import UsageError
from seqmoe_weights.config import ModelConfig

if TYPE_CHECKING:  # the help of `bench` names the shapes, and shall not load torch
    from seqmoe_weights.layout import RecordLayout

_QWEN3_30B_A3B = ModelConfig(
    family="qwen3_moe",
    num_hidden_layers=48,
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151936,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    max_position_embeddings=40960,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    dense_format="BF16",
)
_MIXTRAL_8X7B = replace(
    _QWEN3_30B_A3B,
    family="mixtral",
    num_hidden_layers=32,
    hidden_size=4096,
    num_key_value_heads=8,
    vocab_size=32000,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=14336,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
)
_NARROW = replace(
    _QWEN3_30B_A3B,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=2048,
    moe_intermediate_size=128,
)
_TINY = replace(
    _NARROW, num_hidden_layers=6, num_experts=16, num_experts_per_tok=4, hidden_size=256
)


@dataclass(frozen=True)
class Shape:
    """All that a memory plan and an engine ask of a model, but the weights."""

    name: str
    config: ModelConfig

    @property
    def layouts(self) -> tuple[RecordLayout, ...]:
        from seqmoe_weights.layout import RecordLayout

        config = self.config
        dtype = "F8_E4M3" if config.dense_format == "FP8" else config.dense_format
        layout = RecordLayout.for_experts(config.hidden_size, config.moe_intermediate_size, dtype)
        return (layout,) * config.num_hidden_layers

    @property
    def num_bytes(self) -> int:
        """Of all weights, as a packed model has them."""
        from seqmoe_weights.families import find_family, held_bytes

        config = self.config
        specs = find_family(config.family).resident_tensors(config)
        records = config.num_routed_experts * self.layouts[0].record_bytes
        return records + sum(held_bytes(spec, config, 2) for spec in specs)


SHAPES: Mapping[str, Shape] = {
    name: Shape(name, config)
    for name, config in {
        "qwen3-30b-a3b-fp8": replace(_QWEN3_30B_A3B, dense_format="FP8"),
        "qwen3-30b-a3b": _QWEN3_30B_A3B,
        "mixtral-8x7b": _MIXTRAL_8X7B,
        # Qwen3's layers and experts, all of them narrow: its recorded routing fits, on any machine.
        "qwen3-narrow": _NARROW,
        "tiny": _TINY,
    }.items()
}


def find_shape(name: str) -> Shape:
    """The shape of that name; raises `UsageError` when there is none."""
    if name not in SHAPES:
        raise UsageError(f"--shape {name!r} is not known", f"use one of: {', '.join(SHAPES)}")
    return SHAPES[name]
