"""OLMoE-1B-7B: `OlmoeForCausalLM`. Norms of q and k run over the full projection width."""

from __future__ import annotations

from seqmoe_weights.config import ModelConfig
from seqmoe_weights.families import Family
from seqmoe_weights.families._common import decoder_weights, qk_norms, read_decoder
from seqmoe_weights.fields import Fields


def _read_config(fields: Fields) -> ModelConfig:
    return read_decoder(
        fields,
        experts="num_experts",
        inter="intermediate_size",
        default_kv_heads=True,
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
    )


FAMILY = Family(
    "olmoe", _read_config, decoder_weights(experts="mlp") | qk_norms("query_width", "key_width")
)
