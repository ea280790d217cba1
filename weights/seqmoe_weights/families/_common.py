"""What the families share: config fields that mean the same in all of them, attention tensors."""

from __future__ import annotations

from seqmoe_weights.config import ModelConfig
from seqmoe_weights.errors import CheckpointError, UnsupportedError
from seqmoe_weights.families import TensorSpec, scale_spec
from seqmoe_weights.fields import Fields

_MAX_COUNT = 10_000  # of layers, heads or experts: beyond it the field is nonsense
_PLAIN_FORMATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def read_decoder(
    fields: Fields, *, experts: str, inter: str, default_kv_heads: bool, norm_topk_prob: bool
) -> ModelConfig:
    """Read the fields of a pre-norm decoder whose every layer is a mixture of experts.

    `experts` and `inter` are the family's names of the number of experts and of their
    intermediate size; `default_kv_heads`: without `num_key_value_heads` every head has its own.
    """
    for name, allowed in (("attention_bias", False), ("hidden_act", "silu"), ("clip_qkv", None)):
        fields.require(name, allowed)
    fields.require("partial_rotary_factor", 1.0)
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
    hint = "the fields contradict each other; the checkpoint is damaged"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if not has_head_dim and config.hidden_size % heads:
        raise CheckpointError(
            f"config.json: hidden_size {config.hidden_size} is no multiple of "
            f"num_attention_heads {heads}, and head_dim is missing",
            hint,
        )
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {kv_heads}",
            hint,
        )
    if config.head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {config.head_dim} is odd", hint)
    if config.num_experts_per_tok > config.num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {config.num_experts_per_tok} is more than "
            f"{experts} {config.num_experts}",
            hint,
        )


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
        quantization.require("quant_method", "fp8")
        quantization.require("fmt", "e4m3")
        quantization.require("activation_scheme", "dynamic")
        quantization.require("weight_block_size", [128, 128])
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


def dense_tensors(config: ModelConfig, router: str) -> list[TensorSpec]:
    """Everything but experts and q/k norms: embedding, attention, layer norms, router, head.

    `router` is the name of its weight within a layer.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    specs = [
        TensorSpec("model.embed_tokens.weight", (vocab, hidden)),
        TensorSpec("model.norm.weight", (hidden,)),
    ]
    if not config.tie_word_embeddings:
        specs.append(TensorSpec("lm_head.weight", (vocab, hidden)))
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        specs += [
            TensorSpec(f"{at}.input_layernorm.weight", (hidden,)),
            TensorSpec(f"{at}.self_attn.q_proj.weight", (queries, hidden), quantized=True),
            TensorSpec(f"{at}.self_attn.k_proj.weight", (keys, hidden), quantized=True),
            TensorSpec(f"{at}.self_attn.v_proj.weight", (keys, hidden), quantized=True),
            TensorSpec(f"{at}.self_attn.o_proj.weight", (hidden, queries), quantized=True),
            TensorSpec(f"{at}.post_attention_layernorm.weight", (hidden,)),
            TensorSpec(f"{at}.{router}", (config.num_experts, hidden)),
        ]
    return specs


def qk_norms(config: ModelConfig, query_width: int, key_width: int) -> list[TensorSpec]:
    """The norms of q and k in every layer, of the given widths."""
    return [
        TensorSpec(f"model.layers.{layer}.self_attn.{name}_norm.weight", (width,))
        for layer in range(config.num_hidden_layers)
        for name, width in (("q", query_width), ("k", key_width))
    ]


def swiglu_tensors(
    config: ModelConfig, prefix: str, names: dict[str, str]
) -> dict[str, TensorSpec]:
    """The tensors of one expert at `prefix`; `names` maps gate, up, down to the family's words."""
    hidden, inter = config.hidden_size, config.moe_intermediate_size
    shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    parts = {
        part: TensorSpec(f"{prefix}.{names[part]}.weight", shape, quantized=True)
        for part, shape in shapes.items()
    }
    if config.dense_format == "FP8":
        parts |= {f"{part}_scale": scale_spec(spec) for part, spec in parts.items()}
    return parts
