"""DST: what a conversion does with a folder that holds something, and when it cannot be written."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seqmoe_weights import convert as convert_module
from seqmoe_weights.convert import Conversion, convert
from seqmoe_weights.errors import PackedModelError, ResourceError, SeqmoeError
from seqmoe_weights.packed import PackedModel
from tests.checkpoints import contents, write_checkpoint

Checkpoint = Callable[..., Path]


def test_again_over_a_complete_model(tmp_path: Path, checkpoint: Checkpoint) -> None:
    source, target = checkpoint("olmoe"), tmp_path / "packed"
    convert(source, target, "keep", False)
    before = contents(target)
    stamps = {file.name: file.stat().st_mtime_ns for file in target.iterdir()}
    (target / ".convert.json").write_text("{", "utf-8")
    (target / "experts-00001.bin.part").write_bytes(b"left over")
    (target / "experts-00099.bin").write_bytes(b"left over")
    (target / "notes.txt").write_text("mine", "utf-8")
    assert convert(source, target, "keep", False) == "unchanged"
    assert (target / "notes.txt").read_text("utf-8") == "mine"
    (target / "notes.txt").unlink()
    assert contents(target) == before
    assert {file.name: file.stat().st_mtime_ns for file in target.iterdir()} == stamps


@pytest.mark.parametrize("name", ["experts-00001.bin", "resident.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "remove"])
def test_again_over_a_damaged_model_repairs_it(
    tmp_path: Path, checkpoint: Checkpoint, name: str, damage: str
) -> None:
    source, target = checkpoint("olmoe"), tmp_path / "packed"
    convert(source, target, "keep", False)
    before = contents(target)
    data = bytearray((target / name).read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "truncate":
        del data[-100:]
    elif damage == "extend":
        data += b"x"
    (target / name).write_bytes(data)
    if damage == "remove":
        (target / name).unlink()
    assert convert(source, target, "keep", False) == "repaired"
    assert contents(target) == before


def test_another_source_or_setting_is_refused(tmp_path: Path, checkpoint: Checkpoint) -> None:
    target = tmp_path / "packed"
    convert(checkpoint("olmoe"), target, "keep", False)
    before = contents(target)
    refused = [
        (checkpoint("olmoe"), "fp8", "--quantize keep"),
        (checkpoint("olmoe", seed=1), "keep", "other weights"),
        (checkpoint("mixtral"), "keep", "config.json differs"),
    ]
    for source, quantize, named in refused:
        with pytest.raises(SeqmoeError, match=named) as caught:
            convert(source, target, quantize, False)
        assert "--force" in caught.value.hint
        assert str(target) in caught.value.message
        assert contents(target) == before


@pytest.mark.parametrize("options", [{"seed": 1}, {"num_hidden_layers": 1}])
def test_force_leaves_nothing_of_the_model_before(
    tmp_path: Path, checkpoint: Checkpoint, options: dict[str, int]
) -> None:
    convert(checkpoint("olmoe"), tmp_path / "packed", "keep", False)
    source = checkpoint("olmoe", **options)
    convert(source, tmp_path / "packed", "fp8", True)
    convert(source, tmp_path / "fresh", "fp8", False)
    assert contents(tmp_path / "packed") == contents(tmp_path / "fresh")


def test_force_over_a_damaged_or_newer_manifest(tmp_path: Path, checkpoint: Checkpoint) -> None:
    source, target = checkpoint("olmoe"), tmp_path / "packed"
    convert(source, target, "keep", False)
    before = contents(target)
    (target / "manifest.json").write_text('{"format": "seqmoe", "format_version": 2}', "utf-8")
    with pytest.raises(PackedModelError, match="is damaged or of another version"):
        convert(source, target, "keep", False)
    convert(source, target, "keep", True)
    assert contents(target) == before


@pytest.mark.parametrize("manifest", [None, "{"])
def test_force_over_a_lost_or_broken_manifest(
    tmp_path: Path, checkpoint: Checkpoint, manifest: str | None
) -> None:
    source, target = checkpoint("olmoe"), tmp_path / "packed"
    convert(source, target, "keep", False)
    before = contents(target)
    (target / "manifest.json").unlink()
    if manifest is not None:
        (target / "manifest.json").write_text(manifest, "utf-8")
    with pytest.raises(PackedModelError, match="damaged"):
        convert(source, target, "keep", False)
    convert(source, target, "keep", True)
    assert contents(target) == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", "config.json", "manifest.json", ".convert.json"])
def test_a_folder_of_somebody_else_is_never_touched(
    tmp_path: Path, checkpoint: Checkpoint, name: str, force: bool
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text('{"name": "mine"}', "utf-8")
    with pytest.raises(SeqmoeError, match="is not empty and holds no packed model"):
        convert(checkpoint("olmoe"), tmp_path / "mine", "keep", force)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == [name]


def test_force_keeps_foreign_files(tmp_path: Path, checkpoint: Checkpoint) -> None:
    target = tmp_path / "packed"
    convert(checkpoint("olmoe"), target, "keep", False)
    (target / "notes").mkdir()
    before = {file.name for file in target.iterdir()}
    with pytest.raises(SeqmoeError, match="also holds notes"):
        convert(checkpoint("mixtral"), target, "keep", True)
    assert {file.name for file in target.iterdir()} == before
    PackedModel.open(target).verify()


def test_places_that_cannot_be_written(tmp_path: Path, checkpoint: Checkpoint) -> None:
    source = checkpoint("olmoe")
    (tmp_path / "file").write_text("", "utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target, named in [
        (source, "DST is SRC"),
        (source / "." / "..", "is not empty"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "below", "file/below"),
        (tmp_path / "link", "broken link"),
        (Path("/proc/packed"), "/proc/packed"),
    ]:
        with pytest.raises(SeqmoeError, match=named) as caught:
            convert(source, target, "keep", False)
        assert caught.value.hint
    (tmp_path / "empty").mkdir()
    assert convert(source, tmp_path / "empty", "keep", False) == "converted"


def test_sources_that_are_no_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    for source in (tmp_path / "file", tmp_path / "nothing"):
        with pytest.raises(SeqmoeError, match="is not a folder"):
            convert(source, tmp_path / "packed", "keep", False)


def test_disk_is_checked_before_anything_is_written(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = checkpoint("olmoe"), tmp_path / "packed"
    needed = Conversion(source, target, "keep", False).total_bytes
    monkeypatch.setattr(convert_module, "free_disk_bytes", lambda path: needed)
    with pytest.raises(ResourceError, match=r"[\d.]+ MiB needed, [\d.]+ MiB free") as caught:
        convert(source, target, "keep", False)
    assert str(target) in caught.value.message
    assert not target.exists()
    monkeypatch.setattr(convert_module, "free_disk_bytes", lambda path: needed + 2**21)
    assert convert(source, target, "keep", False) == "converted"
    # What is there already need not be free, and looking at it needs nothing.
    monkeypatch.setattr(convert_module, "free_disk_bytes", lambda path: 0)
    assert convert(source, target, "keep", False) == "unchanged"


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """A stand-in for a disk that fills up: the kernel refuses to let a file grow any further."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_write_that_fails_is_named_and_can_be_resumed(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    source, target = checkpoint("olmoe"), tmp_path / "packed"
    limit = Conversion(source, target, "keep", False).packer.resident_bytes + 4096
    with largest_file(limit), pytest.raises(SeqmoeError, match="cannot write") as caught:
        convert(source, target, "keep", False)
    assert str(target / "experts-00000.bin") in caught.value.message
    with pytest.raises(PackedModelError, match="unfinished"):
        PackedModel.open(target)
    convert(source, target, "keep", False)
    convert(source, tmp_path / "fresh", "keep", False)
    assert contents(target) == contents(tmp_path / "fresh")


def test_a_second_conversion_has_to_wait(tmp_path: Path, checkpoint: Checkpoint) -> None:
    source, target = checkpoint("olmoe"), tmp_path / "packed"
    second = Conversion(source, target, "keep", False)

    def start_second(done: int, total: int) -> None:
        with pytest.raises(SeqmoeError, match="another seqmoe convert is writing"):
            second.run()

    assert convert(source, target, "keep", False, start_second) == "converted"
    PackedModel.open(target).verify()


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "olmoe")
    weights = source / "model.safetensors"

    def touch(done: int, total: int) -> None:
        os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))

    with pytest.raises(SeqmoeError, match="was changed while it was converted"):
        convert(source, tmp_path / "packed", "keep", False, touch)
    assert not (tmp_path / "packed" / "manifest.json").exists()
