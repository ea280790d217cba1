"""Packed models that are damaged: opening or reading them says which file, layer and expert."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from seqmoe_weights.errors import PackedModelError
from seqmoe_weights.manifest import seal
from seqmoe_weights.packed import PackedModel
from seqmoe_weights.store import HostStore

Packed = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path, packed: Packed) -> Path:
    """A packed model that the test may damage."""
    return shutil.copytree(packed("qwen3_moe", fp8=True), tmp_path / "model")


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 0x10
    file.write_bytes(data)


def test_what_an_open_model_tells(model: Path) -> None:
    packed = PackedModel.open(model)
    assert packed.name == "model"
    assert {layout.format for layout in packed.layouts} == {"F8_E4M3"}
    assert packed.config.dense_format == "FP8"
    assert packed.resident_bytes == (model / "resident.safetensors").stat().st_size
    assert packed.records_bytes == sum(f.stat().st_size for f in model.glob("experts-*.bin"))
    assert packed.manifest["format_version"] == 1


@pytest.mark.parametrize(
    ("place", "layer", "expert"),
    [(0, 0, 0), (3 * 53_248 + 1000, 1, 3), (8 * 53_248 - 1, 2, 7)],
)
def test_flipped_byte_in_a_record(model: Path, place: int, layer: int, expert: int) -> None:
    flip(model / f"experts-0000{layer}.bin", place)
    packed = PackedModel.open(model)
    for read in (packed.verify, lambda: HostStore.load(packed, pin=False)):
        with pytest.raises(PackedModelError) as caught:
            read()
        assert f"experts-0000{layer}.bin" in caught.value.message
        assert f"layer {layer}, expert {expert} " in caught.value.message
        assert "seqmoe convert" in caught.value.hint


@pytest.mark.parametrize("position", [0, 5, 8, 40, 200, 3000, 100_000, -1])
def test_flipped_byte_in_the_resident_file(model: Path, position: int) -> None:
    """In the header's length, its JSON, its padding, and the data."""
    flip(model / "resident.safetensors", position)
    packed = PackedModel.open(model)
    for read in (packed.verify, lambda: packed.load_resident("cpu", torch.float32)):
        with pytest.raises(PackedModelError, match=r"resident\.safetensors in .* is damaged"):
            read()


def test_every_flipped_bit_of_the_header_is_noticed(model: Path) -> None:
    data = (model / "resident.safetensors").read_bytes()
    packed = PackedModel.open(model)
    for position in range(0, 3600, 37):
        flip(model / "resident.safetensors", position)
        with pytest.raises(PackedModelError, match="is damaged"):
            packed.load_resident("cpu", torch.float32)
        (model / "resident.safetensors").write_bytes(data)
    packed.load_resident("cpu", torch.float32)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_changed_small_file(model: Path, name: str) -> None:
    flip(model / name, 20)
    with pytest.raises(PackedModelError, match=f"{name} in .* is damaged"):
        PackedModel.open(model)


@pytest.mark.parametrize("name", ["experts-00001.bin", "resident.safetensors", "tokenizer.json"])
def test_missing_or_truncated_file(model: Path, name: str) -> None:
    data = (model / name).read_bytes()
    (model / name).write_bytes(data[:-1])
    with pytest.raises(PackedModelError, match=rf"{name} in .* has \d+ bytes, not {len(data)}"):
        PackedModel.open(model)
    (model / name).unlink()
    with pytest.raises(PackedModelError, match=f"{name} is missing in"):
        PackedModel.open(model)


def test_a_file_that_shrinks_after_opening(model: Path) -> None:
    packed = PackedModel.open(model)
    for name in ("experts-00002.bin", "resident.safetensors"):
        (model / name).write_bytes((model / name).read_bytes()[:-1])
    with pytest.raises(PackedModelError, match="layer 2, expert 7"):
        HostStore.load(packed, pin=False)
    with pytest.raises(PackedModelError, match="resident"):
        packed.load_resident("cpu", torch.float32)
    (model / "experts-00002.bin").unlink()
    with pytest.raises(PackedModelError, match=r"experts-00002\.bin"):
        HostStore.load(packed, pin=False)


MANIFESTS: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: m.update(format="other"), "not one of seqmoe"),
    (lambda m: m.update(format_version=2), "format_version 2 is not supported"),
    (lambda m: m.update(format_version=True), "format_version True is not supported"),
    (lambda m: m.pop("layout"), "layout"),
    (lambda m: m.update(num_layers="3"), "'3'"),
    (lambda m: m["files"].update({"../x": m["files"]["config.json"]}), "'../x'"),
    (lambda m: m["files"].update({"config.json": 3}), "damaged"),
    (lambda m: m["files"].pop("config.json"), "damaged"),
    (lambda m: m["files"].pop("experts-00001.bin"), "contradicts config.json"),
    (lambda m: m["files"].pop("resident.safetensors"), "contradicts config.json"),
    (lambda m: m.update(num_layers=10**12), "contradicts config.json"),
    (lambda m: m.update(num_experts=1), "contradicts config.json"),
    (lambda m: m.update(family="mixtral"), "contradicts config.json"),
    (lambda m: m["files"]["experts-00001.bin"]["sha256"].pop(), "damaged"),
    (lambda m: m["layout"]["parts"][1].update(offset=0), "contradicts config.json"),
    (lambda m: m["layout"]["parts"][0].update(dtype="BF16"), "contradicts config.json"),
    (lambda m: m["layout"]["parts"][0].update(dtype="Q4"), "damaged"),
    (lambda m: m["layout"].update(record_bytes=4096), "contradicts config.json"),
    (lambda m: m["layout"].update(parts=[]), "damaged"),
]


@pytest.mark.parametrize(("change", "named"), MANIFESTS)
def test_manifest_that_is_not_what_was_written(
    model: Path, change: Callable[[Any], object], named: str
) -> None:
    manifest = json.loads((model / "manifest.json").read_text("utf-8"))
    change(manifest)
    manifest["sha256"] = seal(manifest)
    (model / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(PackedModelError) as caught:
        PackedModel.open(model)
    assert "manifest.json" in caught.value.message
    assert named in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"{} {}"])
def test_manifest_that_is_not_json(model: Path, data: bytes) -> None:
    (model / "manifest.json").write_bytes(data)
    with pytest.raises(PackedModelError, match=r"manifest\.json"):
        PackedModel.open(model)


def test_folders_that_are_no_packed_models(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(PackedModelError, match=r"no manifest\.json"):
        PackedModel.open(tmp_path)
    with pytest.raises(PackedModelError, match="is not a folder"):
        PackedModel.open(tmp_path / "nothing")
    source = checkpoint("olmoe")
    with pytest.raises(PackedModelError, match="a checkpoint that is not packed yet") as caught:
        PackedModel.open(source)
    assert caught.value.hint == f"run seqmoe convert {source}"
    with pytest.raises(PackedModelError, match="is not a folder"):
        PackedModel.open(source / "config.json")


def test_an_unsupported_config_keeps_its_reason(model: Path) -> None:
    """As after a downgrade: the config is intact, but this version does not know it."""
    from seqmoe_weights.files import FileHashes

    config = json.loads((model / "config.json").read_text("utf-8")) | {"attention_bias": True}
    data = json.dumps(config).encode()
    (model / "config.json").write_bytes(data)
    manifest = json.loads((model / "manifest.json").read_text("utf-8"))
    manifest["files"]["config.json"] = FileHashes.of_bytes(data).as_json()
    manifest["sha256"] = seal(manifest)
    (model / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(PackedModelError, match="attention_bias = True is not implemented"):
        PackedModel.open(model)


def test_verify_reports_progress(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    PackedModel.open(model).verify(lambda done, total: seen.append((done, total)))
    files = [file for file in model.iterdir() if file.name != "manifest.json"]
    total = sum(file.stat().st_size for file in files)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resident_dtypes(model: Path, dtype: torch.dtype) -> None:
    for name, tensor in PackedModel.open(model).load_resident("cpu", dtype).items():
        if name.endswith("_scale_inv"):
            assert tensor.dtype == torch.float32
        elif name.endswith("_proj.weight"):
            assert tensor.dtype == torch.float8_e4m3fn
        else:
            assert tensor.dtype == dtype


def test_lost_manifest_is_named(model: Path) -> None:
    (model / "manifest.json").unlink()
    with pytest.raises(PackedModelError, match=r"manifest\.json is missing in ") as caught:
        PackedModel.open(model)
    assert "--force" in caught.value.hint


def test_every_flipped_bit_of_the_manifest_is_noticed(model: Path) -> None:
    """But for white space, which means nothing."""
    content = (model / "manifest.json").read_bytes()
    whole = json.loads(content)
    for place in range(0, len(content), 37):
        changed = bytearray(content)
        changed[place] ^= 1
        (model / "manifest.json").write_bytes(changed)
        try:
            if json.loads(changed) == whole:
                continue
        except ValueError:
            pass
        with pytest.raises(PackedModelError, match=r"manifest\.json"):
            PackedModel.open(model)
