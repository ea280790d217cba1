"""OLMoE-1B-7B: `OlmoeForCausalLM`. Norms of q and k run over the full projection width."""

from __future__ import annotations

from typing import Any

from seqmoe_weights.config import ModelConfig
from seqmoe_weights.families import Family, TensorSpec
from seqmoe_weights.families._common import dense_tensors, qk_norms, read_decoder, swiglu_tensors
from seqmoe_weights.fields import Fields

_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def _read_config(config: dict[str, Any]) -> ModelConfig:
    fields = Fields(config)
    return read_decoder(
        fields,
        experts="num_experts",
        inter="intermediate_size",
        default_kv_heads=True,
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
    )


def _resident_tensors(config: ModelConfig) -> list[TensorSpec]:
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return dense_tensors(config, router="mlp.gate.weight") + qk_norms(config, queries, keys)


def _expert_tensors(config: ModelConfig, layer: int, expert: int) -> dict[str, TensorSpec]:
    return swiglu_tensors(config, f"model.layers.{layer}.mlp.experts.{expert}", _NAMES)


FAMILY = Family("olmoe", _read_config, _resident_tensors, _expert_tensors)
