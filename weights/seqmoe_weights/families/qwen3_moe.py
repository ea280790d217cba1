"""Qwen3-30B-A3B and its relatives, BF16 or FP8: `Qwen3MoeForCausalLM`."""

from __future__ import annotations

from typing import Any

from seqmoe_weights.config import ModelConfig
from seqmoe_weights.families import Family, TensorSpec
from seqmoe_weights.families._common import dense_tensors, qk_norms, read_decoder, swiglu_tensors
from seqmoe_weights.fields import Fields

_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def _read_config(config: dict[str, Any]) -> ModelConfig:
    fields = Fields(config)
    fields.require("use_sliding_window", False)
    fields.require("mlp_only_layers", [])
    fields.require("decoder_sparse_step", 1)
    return read_decoder(
        fields,
        # transformers 5 spells it num_local_experts when it saves the config again
        experts="num_experts" if "num_experts" in fields else "num_local_experts",
        inter="moe_intermediate_size",
        default_kv_heads=False,
        norm_topk_prob=fields.boolean("norm_topk_prob"),
    )


def _resident_tensors(config: ModelConfig) -> list[TensorSpec]:
    norms = qk_norms(config, config.head_dim, config.head_dim)
    return dense_tensors(config, router="mlp.gate.weight") + norms


def _expert_tensors(config: ModelConfig, layer: int, expert: int) -> dict[str, TensorSpec]:
    return swiglu_tensors(config, f"model.layers.{layer}.mlp.experts.{expert}", _NAMES)


FAMILY = Family("qwen3_moe", _read_config, _resident_tensors, _expert_tensors)
