"""Splits a dense Llama into a Mixtral that computes exactly the same.

The rows of the FFN are cut into E equal experts. A router of zeros gives every expert the weight
1/E, every token goes to all E of them, and the down projections are multiplied by E, so that the
weighted sum of the experts is the FFN again. E is a power of two: no product rounds.

    python -m tools.demo_model.split FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tools.demo_model.checkpoint import write_checkpoint
from tools.demo_model.source import packaged_gguf, read_gguf

NUM_EXPERTS = 4


def split_config(dense: dict[str, Any], num_experts: int = NUM_EXPERTS) -> dict[str, Any]:
    """config.json of the Mixtral that `split_tensors` makes of a dense Llama."""
    return dense | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": dense["intermediate_size"] // num_experts,
        "num_local_experts": num_experts,
        "num_experts_per_tok": num_experts,
        "sliding_window": None,
    }


def split_tensors(
    dense: dict[str, torch.Tensor], num_experts: int = NUM_EXPERTS
) -> dict[str, torch.Tensor]:
    """Rename the dense tensors to Mixtral's and cut each FFN matrix into `num_experts` parts."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in dense.items():
        layer, is_ffn, part = name.partition(".mlp.")
        if not is_ffn:
            made[name] = tensor
            continue
        moe = f"{layer}.block_sparse_moe"
        if part == "down_proj.weight":
            pieces, target = (tensor * num_experts).chunk(num_experts, dim=1), "w2"
        else:
            pieces = tensor.chunk(num_experts, dim=0)
            target = "w1" if part == "gate_proj.weight" else "w3"
            made[f"{moe}.gate.weight"] = torch.zeros(num_experts, tensor.shape[1])
        for expert, piece in enumerate(pieces):
            made[f"{moe}.experts.{expert}.{target}.weight"] = piece
    return made


def make_checkpoint(folder: Path) -> Path:
    """Split the packaged SmolLM2 into `folder`; raises `FileNotFoundError` without the package."""
    dense = read_gguf(packaged_gguf())
    config, tensors = split_config(dense.config), split_tensors(dense.tensors)
    write_checkpoint(folder, config, tensors, dense.tokenizer)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.demo_model.split FOLDER")
    make_checkpoint(Path(sys.argv[1]))
