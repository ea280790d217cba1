"""A conversion from end to end: what is in the packed model, and what may become of a folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from seqmoe_kernels.formats import find_format
from seqmoe_weights.convert import Conversion, convert
from seqmoe_weights.errors import SeqmoeError
from seqmoe_weights.families import find_family, scale_spec
from seqmoe_weights.layout import part_view
from seqmoe_weights.packed import PackedModel
from tests.checkpoints import contents, write_checkpoint

MODELS = [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"fp8": True}),
    ("qwen3_moe", {"fp8": True, "scale_dtype": "F32"}),
    ("qwen3_moe", {"torch_dtype": "float32", "moe_intermediate_size": 72}),
    ("mixtral", {"torch_dtype": "float16"}),
    ("mixtral", {"fp8": True}),
    ("olmoe", {"num_experts": 5}),
]
Checkpoint = Callable[..., Path]


def records(packed: PackedModel, layer: int) -> torch.Tensor:
    data = bytearray(packed.records_file(layer)[0].read_bytes())
    return torch.frombuffer(data, dtype=torch.uint8).view(-1, packed.layouts[0].record_bytes)


def check_against_source(source: Path, packed: PackedModel, quantized: bool) -> None:
    tensors = load_file(source / "model.safetensors")
    config, family = packed.config, find_family(packed.config.family)
    for layer in range(config.num_hidden_layers):
        rows = records(packed, layer)
        assert len(rows) == config.num_experts
        for expert, record in enumerate(rows):
            stamp = part_view(record, packed.layouts[0]["stamp"]).item()
            assert stamp == layer * config.num_experts + expert
            for part, spec in family.expert_tensors(config, layer, expert).items():
                found, wanted = part_view(record, packed.layouts[0][part]), tensors[spec.name]
                scale = tensors.get(scale_spec(spec).name)
                if quantized:
                    wanted, scale = find_format("F8_E4M3").encode(wanted)
                if scale is not None:
                    kept = part_view(record, packed.layouts[0][f"{part}_scale"])
                    assert torch.equal(kept, scale.float())
                assert found.dtype == wanted.dtype
                assert torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize(("family", "options"), MODELS)
def test_every_byte_comes_from_the_source(
    tmp_path: Path, checkpoint: Checkpoint, family: str, options: dict[str, object]
) -> None:
    source = checkpoint(family, **options)
    assert convert(source, tmp_path / "packed", "keep", False) == "converted"
    packed = PackedModel.open(tmp_path / "packed")
    check_against_source(source, packed, quantized=False)
    tensors, resident = (
        load_file(source / "model.safetensors"),
        packed.load_resident("cpu", torch.float32),
    )
    assert not [name for name in resident if ".experts." in name]
    assert resident.keys() == {name for name in tensors if ".experts." not in name}
    for name, tensor in resident.items():
        is_fp8 = tensors[name].dtype == torch.float8_e4m3fn
        assert tensor.dtype == (tensors[name].dtype if is_fp8 else torch.float32)
        assert torch.equal(tensor.float(), tensors[name].float())
    packed.verify()


def test_resident_file_is_ordinary_safetensors(tmp_path: Path, checkpoint: Checkpoint) -> None:
    source = checkpoint("qwen3_moe", fp8=True)
    convert(source, tmp_path / "packed", "keep", False)
    resident = load_file(tmp_path / "packed" / "resident.safetensors")
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".experts." not in name:
            assert torch.equal(resident[name].float(), tensor.float())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_quantize_fp8(tmp_path: Path, checkpoint: Checkpoint, dtype: str) -> None:
    source = checkpoint("olmoe", torch_dtype=dtype, moe_intermediate_size=136)
    convert(source, tmp_path / "packed", "fp8", False)
    packed = PackedModel.open(tmp_path / "packed")
    assert {layout.format for layout in packed.layouts} == {"F8_E4M3"}
    check_against_source(source, packed, quantized=True)
    resident = packed.load_resident("cpu", torch.float32)
    assert all(tensor.dtype == torch.float32 for tensor in resident.values())


def test_quantizing_fp8_experts_is_refused(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with pytest.raises(SeqmoeError, match=r"--quantize fp8: the experts .* are FP8 already"):
        convert(checkpoint("qwen3_moe", fp8=True), tmp_path / "packed", "fp8", False)
    assert not (tmp_path / "packed").exists()


def test_shards_make_no_difference(tmp_path: Path, checkpoint: Checkpoint) -> None:
    convert(checkpoint("qwen3_moe", fp8=True), tmp_path / "one", "keep", False)
    convert(checkpoint("qwen3_moe", fp8=True, sharded=True), tmp_path / "two", "keep", False)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_tied_embeddings_are_held_once(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "qwen3_moe", tie=True)
    assert "lm_head.weight" not in load_file(source / "model.safetensors")
    convert(source, tmp_path / "packed", "keep", False)
    resident = PackedModel.open(tmp_path / "packed").load_resident("cpu", torch.bfloat16)
    assert "model.embed_tokens.weight" in resident
    assert "lm_head.weight" not in resident


def test_small_files_are_copied(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "mixtral")
    (source / "chat_template.jinja").write_text("{{ messages }}", "utf-8")
    (source / "special_tokens_map.json").write_text("{}", "utf-8")
    (source / "LICENSE.txt").write_text("Apache", "utf-8")
    (source / "README.md").write_text("not needed", "utf-8")
    convert(source, tmp_path / "packed", "keep", False)
    copied = {file.name for file in source.iterdir()} - {"README.md", "model.safetensors"}
    assert len(copied) == 7
    for name in copied:
        assert (tmp_path / "packed" / name).read_bytes() == (source / name).read_bytes()
    packed = {file.name for file in (tmp_path / "packed").iterdir()} - copied
    experts = {f"experts-0000{layer}.bin" for layer in range(3)}
    assert packed == {"manifest.json", "resident.safetensors", *experts}


def test_runs_give_the_same_bytes_and_hold_no_paths(tmp_path: Path, checkpoint: Checkpoint) -> None:
    source = checkpoint("olmoe")
    copy = shutil.copytree(source, tmp_path / "elsewhere" / "copied-source")
    convert(source, tmp_path / "first", "keep", False)
    convert(copy, tmp_path / "second", "keep", False)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    manifest = (tmp_path / "second" / "manifest.json").read_text("utf-8")
    assert "copied-source" not in manifest
    assert str(tmp_path) not in manifest
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "first", "second"}


def test_progress_reaches_its_total(tmp_path: Path, checkpoint: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    conversion = Conversion(checkpoint("olmoe"), tmp_path / "packed", "keep", False)
    conversion.run(lambda done, total: seen.append((done, total)))
    done = [done for done, _ in seen]
    assert done == sorted(done)
    assert {total for _, total in seen} == {seen[-1][1]}
    packed = PackedModel.open(tmp_path / "packed")
    assert done[-1] == seen[-1][1] == packed.resident_bytes + packed.records_bytes
    seen.clear()
    packed.load_resident("cpu", torch.float32, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (packed.resident_bytes, packed.resident_bytes)
    seen.clear()
    Conversion(checkpoint("olmoe"), tmp_path / "packed", "keep", False).run(
        lambda done, total: seen.append((done, total))
    )
    assert seen[-1][0] == seen[-1][1] > packed.resident_bytes + packed.records_bytes


def test_manifest_is_what_the_documentation_says(tmp_path: Path, checkpoint: Checkpoint) -> None:
    convert(checkpoint("qwen3_moe", fp8=True), tmp_path / "packed", "keep", False)
    manifest = json.loads((tmp_path / "packed" / "manifest.json").read_text("utf-8"))
    assert sorted(manifest) == [
        "dense_format",
        "family",
        "files",
        "format",
        "format_version",
        "layout",
        "num_experts",
        "num_layers",
        "quantize",
        "sha256",
        "source",
    ]
    experts = manifest["files"]["experts-00002.bin"]
    assert experts["bytes"] == 8 * manifest["layout"]["record_bytes"]
    record = (tmp_path / "packed" / "experts-00002.bin").read_bytes()[-experts["bytes"] // 8 :]
    assert experts["sha256"][7] == hashlib.sha256(record).hexdigest()
