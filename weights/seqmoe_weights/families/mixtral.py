"""Mixtral-8x7B and its relatives: `MixtralForCausalLM`. Router weights are always renormalised."""

from __future__ import annotations

from seqmoe_weights.config import ModelConfig
from seqmoe_weights.families import Family
from seqmoe_weights.families._common import decoder_weights, read_decoder, refuse_sliding_window
from seqmoe_weights.fields import Fields


def _read_config(fields: Fields) -> ModelConfig:
    refuse_sliding_window(fields)
    return read_decoder(
        fields,
        experts="num_local_experts",
        inter="intermediate_size",
        default_kv_heads=False,
        norm_topk_prob=True,
    )


FAMILY = Family(
    "mixtral",
    _read_config,
    decoder_weights(experts="block_sparse_moe", gate="w1", up="w3", down="w2"),
)
