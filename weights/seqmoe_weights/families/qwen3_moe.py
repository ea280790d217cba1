"""Qwen3-30B-A3B and its relatives, BF16 or FP8: `Qwen3MoeForCausalLM`."""

from __future__ import annotations

from seqmoe_weights.config import ModelConfig
from seqmoe_weights.families import Family
from seqmoe_weights.families._common import decoder_weights, qk_norms, read_decoder
from seqmoe_weights.fields import Fields


def _read_config(fields: Fields) -> ModelConfig:
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


FAMILY = Family(
    "qwen3_moe", _read_config, decoder_weights(experts="mlp") | qk_norms("head_dim", "head_dim")
)
