"""A conversion that is killed goes on when it is run again, and ends with the very same bytes."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from seqmoe_weights.convert import Conversion, convert
from seqmoe_weights.errors import PackedModelError, SeqmoeError
from seqmoe_weights.packed import PackedModel
from tests.checkpoints import contents

Checkpoint = Callable[..., Path]
SMALL = {"num_hidden_layers": 2, "num_experts": 3, "fp8": True}


def kill_at(step: int, run: Callable[[Any], object]) -> bool:
    """Run `run(progress)` in a forked process that SIGKILLs itself when it is about to take its
    `step`-th step: a sync, a rename, a removal or a report of written bytes, or has just created a
    file. False when it ended before it took as many."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the parent's other threads do not exist here
        _die_at(step, run)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def _die_at(step: int, run: Callable[[Any], object]) -> None:
    left = step

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            count()
            return function(*args, **options)

        return wrapped

    def open_and_count(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = plain_open(path, mode, *args, **options)
        if "w" in mode:
            count()  # there, and empty
        return file

    code, plain_open = 1, Path.open
    try:
        Path.open = open_and_count  # type: ignore[assignment]
        os.fsync = counting(os.fsync)
        os.replace = counting(os.replace)
        os.unlink = counting(os.unlink)
        run(lambda done, total: count())
        code = 0
    finally:
        os._exit(code)


@pytest.fixture
def whole(tmp_path: Path, checkpoint: Checkpoint) -> dict[str, str]:
    """What an uninterrupted conversion writes."""
    convert(checkpoint("qwen3_moe", **SMALL), tmp_path / "whole", "keep", False)
    return contents(tmp_path / "whole")


def test_killed_anywhere(tmp_path: Path, checkpoint: Checkpoint, whole: dict[str, str]) -> None:
    source, target = checkpoint("qwen3_moe", **SMALL), tmp_path / "packed"
    num_kills, num_unfinished, step = 0, 0, 1
    while kill_at(step, lambda progress: convert(source, target, "keep", False, progress)):
        # The many tensors of the resident file are skipped through, in another rhythm each time.
        at_tensors = step > 5 and not (target / "resident.safetensors").exists()
        step += random.randint(1, 5) if at_tensors else 1
        num_kills += 1
        if (target / "manifest.json").exists():
            PackedModel.open(target).verify()
        else:
            num_unfinished += 1
            with pytest.raises(PackedModelError):
                PackedModel.open(target)
        assert convert(source, target, "keep", False) in ("converted", "unchanged")
        assert contents(target) == whole, f"killed before step {step}"
        shutil.rmtree(target)
    assert num_unfinished > 10
    assert num_kills > num_unfinished  # also between the manifest and the end


def test_killed_again_and_again(
    tmp_path: Path, checkpoint: Checkpoint, whole: dict[str, str]
) -> None:
    source, target = checkpoint("qwen3_moe", **SMALL), tmp_path / "packed"
    num_kills = 0
    while not (target / "manifest.json").exists():
        num_kills += kill_at(
            random.randint(10, 40),
            lambda progress: convert(source, target, "keep", False, progress),
        )
        assert num_kills < 200, "no progress from run to run"
    assert num_kills > 1
    convert(source, target, "keep", False)
    assert contents(target) == whole


def test_killed_while_it_replaces_another_model(
    tmp_path: Path, checkpoint: Checkpoint, whole: dict[str, str]
) -> None:
    """--force: what is there afterwards loads as the old model, or not at all."""
    source, old = checkpoint("qwen3_moe", **SMALL), tmp_path / "old"
    convert(checkpoint("olmoe"), old, "keep", False)
    before, target = contents(old), tmp_path / "packed"
    for step in (1, 2, 3, 4, 7, 12, 25):
        shutil.copytree(old, target)
        assert kill_at(step, lambda progress: convert(source, target, "keep", True, progress))
        if (target / "manifest.json").exists():
            PackedModel.open(target).verify()
            assert before.items() <= contents(target).items()
        assert convert(source, target, "keep", True) == "converted"
        assert contents(target) == whole, f"killed at step {step}"
        shutil.rmtree(target)


def interrupted(source: Path, target: Path, after_bytes: int) -> None:
    """A conversion that ends with KeyboardInterrupt, as Ctrl-C would end it."""

    def interrupt(done: int, total: int) -> None:
        if done > after_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, "keep", False, interrupt)


def half_done(source: Path, target: Path) -> None:
    packer = Conversion(source, target, "keep", False).packer
    interrupted(source, target, packer.resident_bytes + packer.records_bytes // 2)
    assert (target / "experts-00000.bin").exists()
    assert not (target / "manifest.json").exists()


def test_finished_files_are_not_written_again(
    tmp_path: Path, checkpoint: Checkpoint, whole: dict[str, str]
) -> None:
    source, target = checkpoint("qwen3_moe", **SMALL), tmp_path / "packed"
    half_done(source, target)
    finished = ("resident.safetensors", "experts-00000.bin")
    stamps = [(target / name).stat().st_ino for name in finished]
    conversion = Conversion(source, target, "keep", False)
    assert conversion.state == "resume"
    conversion.run()
    assert [(target / name).stat().st_ino for name in finished] == stamps
    assert contents(target) == whole


def test_a_finished_file_that_was_damaged_is_written_again(
    tmp_path: Path, checkpoint: Checkpoint, whole: dict[str, str]
) -> None:
    source, target = checkpoint("qwen3_moe", **SMALL), tmp_path / "packed"
    half_done(source, target)
    data = bytearray((target / "experts-00000.bin").read_bytes())
    data[-5000] ^= 4
    (target / "experts-00000.bin").write_bytes(data)
    (target / "resident.safetensors").unlink()
    convert(source, target, "keep", False)
    assert contents(target) == whole


def test_an_unfinished_model_does_not_load(tmp_path: Path, checkpoint: Checkpoint) -> None:
    half_done(checkpoint("qwen3_moe", **SMALL), tmp_path / "packed")
    with pytest.raises(PackedModelError, match="is an unfinished conversion") as caught:
        PackedModel.open(tmp_path / "packed")
    assert "seqmoe convert" in caught.value.hint


def test_an_unfinished_model_of_something_else_is_refused(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    source, target = checkpoint("olmoe"), tmp_path / "packed"
    interrupted(source, target, 0)
    before = contents(target)
    for other, quantize, named in [
        (checkpoint("olmoe", seed=1), "keep", "another source"),
        (source, "fp8", "--quantize keep"),
    ]:
        with pytest.raises(SeqmoeError, match=named) as caught:
            convert(other, target, quantize, False)
        assert "--force" in caught.value.hint
        assert contents(target) == before
    assert convert(checkpoint("olmoe", seed=1), target, "fp8", True) == "converted"
    convert(checkpoint("olmoe", seed=1), tmp_path / "fresh", "fp8", False)
    assert contents(target) == contents(tmp_path / "fresh")


def test_a_source_that_changed_since_is_refused(
    tmp_path: Path, copy_checkpoint: Checkpoint
) -> None:
    source, target = copy_checkpoint("olmoe"), tmp_path / "packed"
    interrupted(source, target, 0)
    weights = source / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    with pytest.raises(SeqmoeError, match="or SRC has changed since"):
        convert(source, target, "keep", False)


def test_what_is_there_already_needs_no_disk(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = checkpoint("qwen3_moe", **SMALL), tmp_path / "packed"
    half_done(source, target)
    there = sum(file.stat().st_size for file in target.iterdir())
    free = Conversion(source, target, "keep", False).total_bytes - there + 2**21
    monkeypatch.setattr("seqmoe_weights.convert.free_disk_bytes", lambda path: free)
    assert Conversion(source, target, "keep", False).run() == "converted"
