"""Tiny random checkpoints in real tensor names and layouts, with a working tokenizer.

Their weights are chosen so that tests mean something: norms differ from 1, routing is spread over
the experts, FP8 blocks have scales of different sizes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from seqmoe_weights.convert import convert
from seqmoe_weights.families import TensorSpec, find_family, read_config, scale_spec

VOCAB_SIZE = 320  # every id is a token: 256 bytes, merges, 5 added tokens
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = r"""
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
_FP8_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}
_SPELLING = {  # of the fields that the families name differently
    "mixtral": {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    "olmoe": {"moe_intermediate_size": "intermediate_size"},
}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def write_checkpoint(
    folder: Path,
    family: str,
    *,
    fp8: bool = False,
    scale_dtype: str = "BF16",
    seed: int = 0,
    sharded: bool = False,
    tie: bool = False,
    **config_overrides: Any,
) -> Path:
    """Write a checkpoint of `family` into `folder` and return the folder.

    `config_overrides` are fields of config.json; `num_experts` and `moe_intermediate_size` may be
    used for every family. `torch_dtype` (bfloat16, float16, float32) is the dtype of the tensors
    that are not FP8. `scale_dtype` is BF16 or F32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(family, fp8, tie, config_overrides)
    _write_json(folder / "config.json", config)
    _write_tokenizer(folder, config["vocab_size"])
    tensors = dict(_tensors(config, scale_dtype, torch.Generator().manual_seed(seed)))
    if sharded:
        _save_shards(folder, tensors)
    else:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def packed_model(folder: Path, family: str, *, quantize: str = "keep", **options: Any) -> Path:
    """`write_checkpoint` with the same options, then `convert`; the packed folder, in `folder`."""
    source = write_checkpoint(folder / "checkpoint", family, **options)
    convert(source, folder / "packed", quantize, False)
    return folder / "packed"


def contents(folder: Path) -> dict[str, str]:
    """Names and hashes of the files in a folder: equal for folders that are byte-identical."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def _config(family: str, fp8: bool, tie: bool, overrides: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "attention_dropout": 0.0,
        "eos_token_id": VOCAB_SIZE - 3,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 128,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
    }
    if family == "qwen3_moe":
        config |= {
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "intermediate_size": 256,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
        }
    elif family == "mixtral":
        config |= {"head_dim": None, "sliding_window": None}
    elif family == "olmoe":
        config |= {"attention_bias": False, "clip_qkv": None, "norm_topk_prob": False}
        del config["head_dim"]
    config |= overrides
    for common, own in _SPELLING.get(family, {}).items():
        config[own] = config.pop(common)
    if fp8:
        config["quantization_config"] = _FP8_CONFIG | {
            "modules_to_not_convert": _plain_modules(config)
        }
    return config


def _plain_modules(config: dict[str, Any]) -> list[str]:
    roles = ("attention_norm", "mlp_norm", "router")
    specs = find_family(config["model_type"]).resident_tensors(read_config(config))
    layers = [spec.name.removesuffix(".weight") for spec in specs if spec.role in roles]
    return ["lm_head", *layers]


def _tensors(
    config: dict[str, Any], scale_dtype: str, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    family, model = find_family(config["model_type"]), read_config(config)
    dtype = _DTYPES[config["torch_dtype"]]
    specs = family.resident_tensors(model)
    specs.sort(key=lambda spec: spec.role in ("q_norm", "k_norm"))
    for layer in range(model.num_hidden_layers):
        for expert in range(model.num_experts):
            specs += family.expert_tensors(model, layer, expert).values()
    for spec in specs:
        weight = _random(spec, generator)
        if spec.quantized and model.dense_format == "FP8":
            codes, scales = _quantize(spec, weight, generator)
            yield spec.name, codes
            kept = torch.bfloat16 if scale_dtype == "BF16" else torch.float32
            yield scale_spec(spec).name, scales.to(kept)
        else:
            yield spec.name, weight.to(dtype)


def _random(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Float32. Norms 1 +- 0.1; matrices keep the size of their input or, the router's, double it,
    so that experts differ and every one of them is used."""
    values = torch.randn(spec.shape, generator=generator)
    if len(spec.shape) == 1:
        return 1 + 0.1 * values
    if spec.role == "embedding":
        return 0.5 * values
    gain = 2.0 if spec.role == "router" else 1.2
    return values * gain / spec.shape[1] ** 0.5


def _quantize(
    spec: TensorSpec, weight: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 with BF16-exact scales that use between a quarter and the whole of the range."""
    scales = torch.empty(scale_spec(spec).shape)
    rows, columns = scales.shape
    codes = torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            at = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            headroom = 1.1 + 3 * torch.rand((), generator=generator)
            scale = (weight[at].abs().max() / 448 * headroom).to(torch.bfloat16).float()
            scales[row, column] = scale
            codes[at] = weight[at] / scale
    return codes.to(torch.float8_e4m3fn), scales


def _save_shards(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int = 3) -> None:
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    added = [END_OF_TEXT, IM_START, IM_END, "<think>", "</think>"]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges()
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_tokens(
        [AddedToken(token, special=token.startswith("<|"), normalized=False) for token in added]
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE <= vocab_size
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in added}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    _write_json(
        folder / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": [ids[IM_END], ids[END_OF_TEXT]],
            "pad_token_id": ids[END_OF_TEXT],
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
        },
    )


def _merges() -> list[tuple[str, str]]:
    """Pairs that are frequent in English; `\u0120` is how byte-level BPE spells a space."""
    pairs = "th he in er an re on at en nd st es te or ti hi as to it is ng al ed ou ar le se ve"
    pairs += " ch ll ro"
    merges = [(pair[0], pair[1]) for pair in pairs.split()]
    merges += [("\u0120", letter) for letter in "taswcbfopmdhlrngieyukvj"]
    merges += [("th", "e"), ("in", "g"), ("\u0120t", "he"), ("\u0120a", "nd"), ("\u0120o", "f")]
    return merges


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
