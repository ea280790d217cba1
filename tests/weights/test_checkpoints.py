"""The checkpoints of the tests are real ones: transformers loads them, and nothing is left over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from seqmoe_kernels.formats.fp8_block import FP8

Checkpoint = Callable[..., Path]
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"fp8": True}),
    ("qwen3_moe", {"tie": True, "sharded": True}),
    ("mixtral", {}),
    ("mixtral", {"fp8": True, "scale_dtype": "F32"}),
    ("olmoe", {}),
]
TEXT = "Hello, what is photosynthesis? Grüße, 你好 🙂" * 4


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), MODELS)
def test_transformers_loads_them(
    checkpoint: Checkpoint, family: str, options: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = checkpoint(family, **options)
    model, report = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == TEXT
    routed: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(lambda module, inputs, output: routed.append(output[2]))
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    assert logits.isfinite().all()
    assert 0.5 < logits.std().item() < 10
    assert len(routed) == 3
    for chosen in routed:  # every layer uses nearly all of its 8 experts
        assert len(chosen.unique()) >= 6
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert template == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_fp8_blocks_differ_and_reach_far(checkpoint: Checkpoint) -> None:
    source = checkpoint("qwen3_moe", fp8=True, hidden_size=256, moe_intermediate_size=384)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    codes, scales = tensors[name], tensors[f"{name}_scale_inv"]
    assert (codes.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert scales.shape == (3, 2)
    assert len(scales.unique()) == 6
    assert codes.float().abs().max() > 100
    assert 0.5 < FP8.decode((codes, scales.float()), torch.float32).std().item() * 256**0.5 < 2


def test_seeds_differ_and_repeat(tmp_path: Path) -> None:
    from tests.checkpoints import write_checkpoint

    data = [
        (write_checkpoint(tmp_path / str(i), "mixtral", seed=seed) / "model.safetensors")
        for i, seed in enumerate((0, 0, 1))
    ]
    first, again, other = (path.read_bytes() for path in data)
    assert first == again
    assert first != other
