"""Writes a checkpoint folder the way Hugging Face lays it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tools.demo_model.tokenizer import build_tokenizer, tokenizer_config

# How SmolLM2's authors advise to sample from it.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    tokenizer: dict[str, Any],
    sampling: dict[str, Any] = SAMPLING,
) -> None:
    """Write config.json, model.safetensors (BF16), tokenizer and generation settings."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", ids | sampling)
    settings = tokenizer_config(tokenizer, config["max_position_embeddings"])
    _write_json(folder / "tokenizer_config.json", settings)
    build_tokenizer(tokenizer).save(str(folder / "tokenizer.json"))
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
