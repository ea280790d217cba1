"""Mixtral-8x7B and its relatives: `MixtralForCausalLM`. Router weights are always renormalised."""

from __future__ import annotations

from typing import Any

from seqmoe_weights.config import ModelConfig
from seqmoe_weights.families import Family, TensorSpec
from seqmoe_weights.families._common import (
    dense_tensors,
    read_decoder,
    refuse_sliding_window,
    swiglu_tensors,
)
from seqmoe_weights.fields import Fields

_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


def _read_config(config: dict[str, Any]) -> ModelConfig:
    fields = Fields(config)
    refuse_sliding_window(fields)
    return read_decoder(
        fields,
        experts="num_local_experts",
        inter="intermediate_size",
        default_kv_heads=False,
        norm_topk_prob=True,
    )


def _resident_tensors(config: ModelConfig) -> list[TensorSpec]:
    return dense_tensors(config, router="block_sparse_moe.gate.weight")


def _expert_tensors(config: ModelConfig, layer: int, expert: int) -> dict[str, TensorSpec]:
    prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
    return swiglu_tensors(config, prefix, _NAMES)


FAMILY = Family("mixtral", _read_config, _resident_tensors, _expert_tensors)
