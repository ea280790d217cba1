"""Checkpoints that are damaged or contradict themselves: found before anything is written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from seqmoe_weights.convert import Conversion
from seqmoe_weights.errors import CheckpointError, SeqmoeError

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.2.mlp.experts.7.up_proj.weight"
NORM = "model.norm.weight"
Tensors = dict[str, torch.Tensor]
Checkpoint = Callable[..., Path]


def refusal(source: Path) -> SeqmoeError:
    """The error of planning a conversion; nothing may have been written."""
    target = source.parent / "packed"
    with pytest.raises(CheckpointError) as caught:
        Conversion(source, target, "keep", False)
    assert not target.exists()
    assert caught.value.hint
    return caught.value


def change_tensors(source: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")


@pytest.mark.parametrize("name", [Q_PROJ, EXPERT, f"{EXPERT}_scale_inv", NORM, "lm_head.weight"])
def test_missing_tensor(tmp_path: Path, copy_checkpoint: Checkpoint, name: str) -> None:
    source = copy_checkpoint("qwen3_moe", fp8=True)
    change_tensors(source, lambda tensors: tensors.pop(name))
    assert refusal(source).message == f"model.safetensors: tensor {name} is missing"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.layers.3.input_layernorm.weight",
    ],
)
def test_tensor_without_a_place(tmp_path: Path, copy_checkpoint: Checkpoint, name: str) -> None:
    source = copy_checkpoint("qwen3_moe")
    change_tensors(source, lambda tensors: tensors.update({name: torch.ones(128)}))
    said = refusal(source).message
    assert said.startswith(f"model.safetensors: tensor {name} has no place")


CONTRADICTIONS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    (EXPERT, lambda t: t[:-1].contiguous(), "shape [127, 128], not [128, 128]"),
    (EXPERT, lambda t: t.to(torch.bfloat16), "dtype BF16, not F8_E4M3"),
    (EXPERT, lambda t: t.view(torch.uint8), "dtype U8, not F8_E4M3"),
    (EXPERT, lambda t: t.view(torch.float8_e5m2), "dtype F8_E5M2, not F8_E4M3"),
    (f"{EXPERT}_scale_inv", lambda t: t.repeat(2, 1), "shape [2, 1], not [1, 1]"),
    (f"{EXPERT}_scale_inv", lambda t: t.to(torch.float16), "dtype F16, not BF16 or F32"),
    (Q_PROJ, lambda t: t.T.contiguous()[:, :64].contiguous(), "shape [128, 64], not [128, 128]"),
    (NORM, lambda t: t.to(torch.float64), "dtype F64, not BF16, F16 or F32"),
    (NORM, lambda t: t[None], "shape [1, 128], not [128]"),
]


@pytest.mark.parametrize(("name", "change", "named"), CONTRADICTIONS)
def test_shape_or_dtype_that_contradicts_the_config(
    tmp_path: Path,
    copy_checkpoint: Checkpoint,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    named: str,
) -> None:
    source = copy_checkpoint("qwen3_moe", fp8=True)
    change_tensors(source, lambda tensors: tensors.update({name: change(tensors[name])}))
    message = refusal(source).message
    assert message == f"model.safetensors: tensor {name} contradicts config.json: {named}"


def test_fp8_tensors_under_a_plain_config(tmp_path: Path, copy_checkpoint: Checkpoint) -> None:
    source = copy_checkpoint("qwen3_moe", fp8=True)
    edit_config(source, lambda config: config.pop("quantization_config"))
    assert "dtype F8_E4M3, not BF16" in refusal(source).message


def test_scales_beside_a_plain_weight(tmp_path: Path, copy_checkpoint: Checkpoint) -> None:
    source = copy_checkpoint("qwen3_moe")
    change_tensors(source, lambda t: t.update({f"{Q_PROJ}_scale_inv": torch.ones(1, 1)}))
    assert f"{Q_PROJ} is not FP8" in refusal(source).message


def test_modules_that_are_not_converted_are_plain(
    tmp_path: Path, copy_checkpoint: Checkpoint
) -> None:
    """Attention left in BF16 beside FP8 experts, as `modules_to_not_convert` says."""
    source = copy_checkpoint("qwen3_moe", fp8=True)

    def widen(tensors: Tensors) -> None:
        for name in [name for name in tensors if "self_attn" in name]:
            if name.endswith("_scale_inv"):
                del tensors[name]
            else:
                tensors[name] = tensors[name].to(torch.bfloat16)

    change_tensors(source, widen)
    assert "q_proj.weight contradicts config.json: dtype BF16" in refusal(source).message
    edit_config(
        source,
        lambda config: config["quantization_config"]["modules_to_not_convert"].extend(
            f"model.layers.{layer}.self_attn" for layer in range(3)
        ),
    )
    packer = Conversion(source, tmp_path / "packed", "keep", False).packer
    assert (packer.dense_format, packer.layouts[0]["gate"].dtype) == ("BF16", "F8_E4M3")


def test_experts_of_two_dtypes(tmp_path: Path, copy_checkpoint: Checkpoint) -> None:
    source = copy_checkpoint("qwen3_moe")
    change_tensors(source, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].half()}))
    message = refusal(source).message
    assert EXPERT in message
    assert "F16" in message
    assert "BF16" in message


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_truncated_weights(tmp_path: Path, copy_checkpoint: Checkpoint, keep: int) -> None:
    source = copy_checkpoint("mixtral")
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:keep])
    assert refusal(source).message.startswith("model.safetensors cannot be read")


def test_header_of_absurd_length(tmp_path: Path, copy_checkpoint: Checkpoint) -> None:
    source = copy_checkpoint("mixtral")
    data = bytearray((source / "model.safetensors").read_bytes())
    data[:8] = struct.pack("<Q", 2**60)
    (source / "model.safetensors").write_bytes(data)
    assert refusal(source).message.startswith("model.safetensors cannot be read")


def test_no_weights(tmp_path: Path, copy_checkpoint: Checkpoint) -> None:
    source = copy_checkpoint("mixtral")
    (source / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(source).message


def test_missing_shard(tmp_path: Path, copy_checkpoint: Checkpoint) -> None:
    source = copy_checkpoint("olmoe", sharded=True)
    (source / "model-00002-of-00003.safetensors").unlink()
    assert refusal(source).message.startswith("model-00002-of-00003.safetensors is missing in")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda index: index.pop("weight_map"), "weight_map"),
        (lambda index: index["weight_map"].pop(NORM), f"tensor {NORM} is missing"),
        (lambda index: index["weight_map"].update({NORM: "../secret"}), "'../secret'"),
        (lambda index: index["weight_map"].update({NORM: 3}), "no file name"),
        (
            lambda index: index["weight_map"].update({"extra": "model-00001-of-00003.safetensors"}),
            "tensor extra is missing",
        ),
    ],
)
def test_damaged_index(
    tmp_path: Path, copy_checkpoint: Checkpoint, change: Callable[[Any], object], named: str
) -> None:
    source = copy_checkpoint("olmoe", sharded=True)
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text("utf-8"))
    change(index)
    path.write_text(json.dumps(index), "utf-8")
    assert named in refusal(source).message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff", "[" * 100_000])
def test_small_files_that_are_not_json_objects(
    tmp_path: Path, copy_checkpoint: Checkpoint, name: str, text: str
) -> None:
    source = copy_checkpoint("olmoe")
    (source / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert refusal(source).message.startswith(f"{name} is not ")


def test_small_files_that_are_missing_or_wrong(tmp_path: Path, copy_checkpoint: Checkpoint) -> None:
    source = copy_checkpoint("olmoe")
    (source / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja is not UTF-8" in refusal(source).message
    (source / "chat_template.jinja").unlink()
    (source / "tokenizer.json").write_text('{"version": "1.0"}', "utf-8")
    assert "tokenizer.json: field model" in refusal(source).message
    (source / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in refusal(source).message
    (source / "config.json").unlink()
    assert "config.json is missing" in refusal(source).message


NOT_FINITE: list[tuple[bool, str, int]] = [
    (True, EXPERT, 0x7F),
    (True, EXPERT, 0xFF),
    (True, Q_PROJ, 0x7F),
    (False, EXPERT, 0x7F80),  # BF16 infinity
    (False, NORM, 0x7FC0),  # BF16 NaN
    (True, f"{EXPERT}_scale_inv", 0xFF80),
]


@pytest.mark.parametrize(("fp8", "name", "bits"), NOT_FINITE)
def test_values_that_are_not_finite(
    tmp_path: Path, copy_checkpoint: Checkpoint, fp8: bool, name: str, bits: int
) -> None:
    source = copy_checkpoint("qwen3_moe", fp8=fp8)

    def spoil(tensors: Tensors) -> None:
        tensor = tensors[name]
        code = torch.uint8 if tensor.dtype.itemsize == 1 else torch.uint16
        tensor.view(-1).view(code)[-1] = bits

    change_tensors(source, spoil)
    conversion = Conversion(source, tmp_path / "packed", "keep", False)
    with pytest.raises(CheckpointError) as caught:
        conversion.run()
    assert caught.value.message == (
        f"model.safetensors: tensor {name} holds NaN or infinite values"
    )
    assert not (tmp_path / "packed" / "manifest.json").exists()


def edit_config(source: Path, change: Callable[[Any], object]) -> None:
    config = json.loads((source / "config.json").read_text("utf-8"))
    change(config)
    (source / "config.json").write_text(json.dumps(config), "utf-8")
