"""What families share: config fields that mean the same in all of them, weights by role."""

from __future__ import annotations

from seqmoe_weights.config import ModelConfig
from seqmoe_weights.errors import CheckpointError, UnsupportedError
from seqmoe_weights.families import Weight
from seqmoe_weights.fields import Fields

_MAX_COUNT = 10_000  # of layers, heads or experts: beyond it the field is nonsense
_LAYER = "model.layers.{layer}"
_PLAIN_FORMATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def read_decoder(
    fields: Fields, *, experts: str, inter: str, default_kv_heads: bool, norm_topk_prob: bool
) -> ModelConfig:
    """Read the fields of a pre-norm decoder whose every layer is a mixture of experts.

    `experts` and `inter` are the family's names of the number of experts and of their
    intermediate size; `default_kv_heads`: without `num_key_value_heads` every head has its own.
    """
    implemented = {"attention_bias": False, "hidden_act": "silu", "partial_rotary_factor": 1.0}
    for name, allowed in (implemented | {"clip_qkv": None}).items():
        fields.require(name, allowed)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads", maximum=_MAX_COUNT)
    config = ModelConfig(
        family=fields.text("model_type"),
        num_hidden_layers=fields.integer("num_hidden_layers", maximum=_MAX_COUNT),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=fields.integer(
            "num_key_value_heads", heads if default_kv_heads else None, maximum=_MAX_COUNT
        ),
        head_dim=fields.integer("head_dim", max(1, hidden // heads), maximum=_MAX_COUNT),
        vocab_size=fields.integer("vocab_size"),
        num_experts=fields.integer(experts, maximum=_MAX_COUNT),
        num_experts_per_tok=fields.integer("num_experts_per_tok", maximum=_MAX_COUNT),
        moe_intermediate_size=fields.integer(inter),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rope_theta=_rope_theta(fields),
        rms_norm_eps=fields.positive_number("rms_norm_eps"),
        norm_topk_prob=norm_topk_prob,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        dense_format=_dense_format(fields),
    )
    _check_sizes(config, experts, has_head_dim="head_dim" in fields)
    return config


def _check_sizes(config: ModelConfig, experts: str, has_head_dim: bool) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if not has_head_dim and config.hidden_size % heads:
        wrong = f"hidden_size {config.hidden_size} is no multiple of "
        wrong += f"num_attention_heads {heads}, and head_dim is missing"
    elif heads % kv_heads:
        wrong = f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
    elif config.head_dim % 2:
        wrong = f"head_dim {config.head_dim} is odd"
    elif config.num_experts_per_tok > config.num_experts:
        wrong = f"num_experts_per_tok {config.num_experts_per_tok} is more than "
        wrong += f"{experts} {config.num_experts}"
    else:
        return
    hint = "the fields contradict each other; the checkpoint is damaged"
    raise CheckpointError(f"config.json: {wrong}", hint)


def refuse_sliding_window(fields: Fields) -> None:
    """Refuse a window that hides any position that the model may be run with."""
    if "sliding_window" not in fields:
        return
    window, positions = fields.integer("sliding_window"), fields.integer("max_position_embeddings")
    if window < positions:
        raise UnsupportedError(
            f"config.json: sliding_window = {window} is not implemented",
            f"only null or at least max_position_embeddings ({positions}) is supported",
        )


def _rope_theta(fields: Fields) -> float:
    """`rope_theta`, at top level or, as transformers 5 writes it, within `rope_parameters`."""
    scaling, parameters = fields.nested("rope_scaling"), fields.nested("rope_parameters")
    for rope in (scaling, parameters):
        if rope is not None:
            rope.require("rope_type", "default")
            rope.require("type", "default")
            rope.require("partial_rotary_factor", 1.0)
    if parameters is not None and "rope_theta" in parameters:
        return parameters.positive_number("rope_theta")
    return fields.positive_number("rope_theta")


def _dense_format(fields: Fields) -> str:
    quantization = fields.nested("quantization_config")
    if quantization is not None:
        quantization.text("quant_method")
        implemented = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        for name, allowed in (implemented | {"weight_block_size": [128, 128]}).items():
            quantization.require(name, allowed)
        if "weight_block_size" not in quantization:
            raise UnsupportedError(
                "config.json: quantization_config fp8 without weight_block_size is not implemented",
                "only blocks of [128, 128] are supported",
            )
        return "FP8"
    name = "dtype" if "dtype" in fields else "torch_dtype"
    dtype = fields.text(name, "bfloat16")
    if dtype not in _PLAIN_FORMATS:
        raise UnsupportedError(
            f"config.json: {name} {dtype!r} is not supported",
            f"supported are {', '.join(_PLAIN_FORMATS)}",
        )
    return _PLAIN_FORMATS[dtype]


def decoder_weights(
    *, experts: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Weight]:
    """By role, the weights of a pre-norm decoder: grouped-query attention, then routed SwiGLU
    experts. `experts` is what a layer calls its mixture of experts; the others are its words for
    the three matrices of an expert."""
    mlp = f"{_LAYER}.{experts}"
    return {
        "embedding": Weight("model.embed_tokens.weight", ("vocab_size", "hidden_size")),
        "final_norm": Weight("model.norm.weight", ("hidden_size",)),
        "head": Weight("lm_head.weight", ("vocab_size", "hidden_size")),
        "attention_norm": Weight(f"{_LAYER}.input_layernorm.weight", ("hidden_size",)),
        "q": _linear(f"{_LAYER}.self_attn.q_proj", "query_width", "hidden_size"),
        "k": _linear(f"{_LAYER}.self_attn.k_proj", "key_width", "hidden_size"),
        "v": _linear(f"{_LAYER}.self_attn.v_proj", "key_width", "hidden_size"),
        "o": _linear(f"{_LAYER}.self_attn.o_proj", "hidden_size", "query_width"),
        "mlp_norm": Weight(f"{_LAYER}.post_attention_layernorm.weight", ("hidden_size",)),
        "router": Weight(f"{mlp}.gate.weight", ("num_experts", "hidden_size")),
        "gate": _linear(f"{mlp}.experts.{{expert}}.{gate}", "moe_intermediate_size", "hidden_size"),
        "up": _linear(f"{mlp}.experts.{{expert}}.{up}", "moe_intermediate_size", "hidden_size"),
        "down": _linear(f"{mlp}.experts.{{expert}}.{down}", "hidden_size", "moe_intermediate_size"),
    }


def qk_norms(query_width: str, key_width: str) -> dict[str, Weight]:
    """By role, norms of q and k in every layer; the widths are fields of `ModelConfig`."""
    return {
        "q_norm": Weight(f"{_LAYER}.self_attn.q_norm.weight", (query_width,)),
        "k_norm": Weight(f"{_LAYER}.self_attn.k_norm.weight", (key_width,)),
    }


def _linear(name: str, rows: str, columns: str) -> Weight:
    return Weight(f"{name}.weight", (rows, columns), quantized=True)
