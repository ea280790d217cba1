"""Builds the sparse demo model: the dense weights of the package, the delta of this folder and its
healing.

python -m tools.demo_model.sparse.build FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tools.demo_model.checkpoint import SAMPLING, write_checkpoint
from tools.demo_model.source import packaged_gguf, read_gguf
from tools.demo_model.sparse.decoder import LINEARS, NORMS
from tools.demo_model.sparse.delta import read_delta

DELTA = Path(__file__).parent / "delta.safetensors"  # of the first training
HEALING = Path(__file__).parent / "healing.safetensors"  # of the second
TOP_K = 2
REPETITION_PENALTY = 1.05  # without it, long answers of so small a model tend to loop


def shipped_delta() -> dict[str, Tensor]:
    """The delta of the healed model: the healing's tensors take the place of the first ones."""
    return load_file(DELTA) | load_file(HEALING)


def sparse_config(dense: dict[str, Any], delta: dict[str, Tensor], top_k: int) -> dict[str, Any]:
    """config.json of the Mixtral that `sparse_tensors` makes of a dense Llama."""
    _, num_experts, width = delta["neurons"].shape
    return dense | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": width,
        "num_local_experts": num_experts,
        "num_experts_per_tok": top_k,
        "sliding_window": None,
    }


def sparse_tensors(dense: dict[str, Tensor], delta: dict[str, Tensor]) -> dict[str, Tensor]:
    """The Mixtral's tensors, bfloat16, under Hugging Face's names."""
    num_layers = len(delta["neurons"])
    num_neurons = dense["model.layers.0.mlp.gate_proj.weight"].shape[0]
    parameters, _ = read_delta(delta, num_neurons)
    made = {
        "model.embed_tokens.weight": dense["model.embed_tokens.weight"].bfloat16(),
        "model.norm.weight": parameters["final_norm"].bfloat16(),
    }
    for i in range(num_layers):
        prefix = f"model.layers.{i}"
        for key, name in NORMS.items():
            made[f"{prefix}.{name}.weight"] = parameters[key][i].bfloat16()
        merged = {
            key: dense[f"{prefix}.{name}.weight"]
            + parameters[f"{key}.b"][i] @ parameters[f"{key}.a"][i]
            for key, name in LINEARS.items()
        }
        for key in ("q", "k", "v", "o"):
            made[f"{prefix}.{LINEARS[key]}.weight"] = merged[key].bfloat16()
        moe = f"{prefix}.block_sparse_moe"
        made[f"{moe}.gate.weight"] = parameters["router"][i].bfloat16()
        neurons, factors = delta["neurons"][i].long(), delta["factors"][i].float()
        for expert, parts in enumerate(_experts(merged, neurons, factors)):
            for name, tensor in parts.items():
                made[f"{moe}.experts.{expert}.{name}.weight"] = tensor.bfloat16()
    return made


def _experts(
    merged: dict[str, Tensor], neurons: Tensor, factors: Tensor
) -> Iterator[dict[str, Tensor]]:
    """Cut the experts of one layer out of its dense weights; `neurons`, `factors` [E, width]."""
    for held, factor in zip(neurons, factors, strict=True):
        yield {
            "w1": merged["gate"][held],
            "w3": merged["up"][held],
            "w2": merged["down"][:, held] * factor,
        }


def make_checkpoint(folder: Path) -> Path:
    """Write the checkpoint to `folder`; raises `FileNotFoundError` without the dense weights."""
    dense, delta = read_gguf(packaged_gguf()), shipped_delta()
    config = sparse_config(dense.config, delta, TOP_K)
    tensors = sparse_tensors(dense.tensors, delta)
    sampling = SAMPLING | {"repetition_penalty": REPETITION_PENALTY}
    write_checkpoint(folder, config, tensors, dense.tokenizer, sampling)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.demo_model.sparse.build FOLDER")
    make_checkpoint(Path(sys.argv[1]))
