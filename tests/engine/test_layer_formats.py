"""A model whose layers store their experts in different formats."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_kernels.formats.fp8_block import FP8
from seqmoe_weights.convert import convert
from seqmoe_weights.packed import PackedModel
from tests.checkpoints import write_checkpoint

EXPERTS = "model.layers.1.mlp.experts"


def widen(source: Path) -> None:
    """Store the experts of layer 1 as F32, which holds the same values, in an FP8 checkpoint."""
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.startswith(EXPERTS) and name.endswith("weight")]:
        scale = tensors.pop(f"{name}_scale_inv").float()
        tensors[name] = FP8.decode((tensors[name], scale), torch.float32)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["quantization_config"]["modules_to_not_convert"].append(EXPERTS)
    (source / "config.json").write_text(json.dumps(config), "utf-8")


def test_layers_of_two_formats_give_the_same_bits(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "qwen3_moe", fp8=True)
    convert(source, tmp_path / "fp8", "keep", False)
    widen(source)
    convert(source, tmp_path / "mixed", "keep", False)
    mixed = PackedModel.open(tmp_path / "mixed")
    mixed.verify()
    assert [layout.format for layout in mixed.layouts] == ["F8_E4M3", "F32", "F8_E4M3"]
    assert len({layout.record_bytes for layout in mixed.layouts}) == 1
    assert isinstance(mixed.manifest["layout"], list)
    assert isinstance(PackedModel.open(tmp_path / "fp8").manifest["layout"], dict)

    options = EngineOptions(PoolSize.parse("5slots"), "cpu", "float32", verify=True)
    ids = torch.randint(0, 320, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for name in ("fp8", "mixed"):
        engine = Engine.open(tmp_path / name, options)
        likelihoods = engine.log_likelihoods(ids)
        engine.reset_kv()
        steps = engine.generate(ids, SamplingParams(temperature=0), max_tokens=8)
        found.append((likelihoods.tolist(), [step.token_id for step in steps]))
    assert found[0] == found[1]
