"""Looking up repositories that are in the Hugging Face cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from seqmoe_weights.convert import convert
from seqmoe_weights.errors import CheckpointError
from seqmoe_weights.hub import resolve_source

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, checkpoint: Callable[..., Path]) -> Path:
    """A cache as huggingface_hub lays it out: snapshots are links to blobs."""
    repo = tmp_path / "hub" / "models--some-org--Tiny-MoE.v1"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(REVISION, "utf-8")
    snapshot = repo / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    shutil.copytree(checkpoint("olmoe"), repo / "blobs")
    for blob in (repo / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return tmp_path / "hub"


def test_a_repository_in_the_cache(cache: Path, tmp_path: Path) -> None:
    folder, name = resolve_source("some-org/Tiny-MoE.v1", cache)
    assert (folder.name, name) == (REVISION, "Tiny-MoE.v1")
    assert convert(folder, tmp_path / "packed", "keep", False) == "converted"
    assert not any(file.is_symlink() for file in (tmp_path / "packed").iterdir())
    assert resolve_source(str(folder), cache) == (folder, "Tiny-MoE.v1")


@pytest.mark.parametrize("what", ["refs/main", f"snapshots/{REVISION}"])
def test_a_repository_that_is_not_wholly_there(cache: Path, what: str) -> None:
    gone = cache / "models--some-org--Tiny-MoE.v1" / what
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(CheckpointError, match="neither a folder nor in the Hugging Face cache"):
        resolve_source("some-org/Tiny-MoE.v1", cache)


def test_a_repository_that_was_never_downloaded(cache: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_source("Qwen/Qwen3-30B-A3B-FP8", cache)
    assert str(cache) in caught.value.message
    assert caught.value.hint == "download it first: hf download Qwen/Qwen3-30B-A3B-FP8"


def test_folders_come_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some-org/Tiny-MoE.v1").mkdir(parents=True)
    assert resolve_source("some-org/Tiny-MoE.v1", cache)[0] == Path("some-org/Tiny-MoE.v1")
    assert resolve_source(".", cache) == (Path(), tmp_path.name)


@pytest.mark.parametrize("source", ["nothing", "a/b/c", "/a/b", "../b", "a/..", "a b/c"])
def test_what_is_no_folder_and_no_repository(cache: Path, source: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_source(source, cache)


def test_a_file_is_no_source(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("", "utf-8")
    with pytest.raises(CheckpointError, match="is a file, not a checkpoint folder"):
        resolve_source(str(tmp_path / "model.gguf"), cache)
