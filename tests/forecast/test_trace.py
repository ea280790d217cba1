"""Trace files: what is in them, that they are the same every time, and what is refused."""

from __future__ import annotations

import random
import zipfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqmoe_cli.errors import SeqmoeError
from seqmoe_cli.forecast import trace as module
from seqmoe_cli.forecast.trace import Trace, TraceError

TOKENS, LAYERS, EXPERTS, TOP_K, RANK, HIDDEN = 7, 3, 8, 2, 4, 16


def make_trace(width: int = EXPERTS, **changes: Any) -> Trace:
    """A random trace of models with `width` experts, with some fields changed."""
    rng = np.random.default_rng(5)
    events = [rng.permutation(width)[:TOP_K] for _ in range(TOKENS * LAYERS)]
    values: dict[str, Any] = {
        "model": "tïny",
        "family": "mixtral",
        "num_experts": width,
        "experts": np.array(events, module.expert_dtype(width)).reshape(TOKENS, LAYERS, TOP_K),
        "sequence": np.array([0, 0, 0, 0, 1, 1, 1], np.uint32),
        "phase": np.array([0, 0, 1, 1, 0, 1, 1], np.uint8),
        "token_ids": rng.integers(0, 70_000, TOKENS, np.uint32),
        "weights": rng.random((TOKENS, LAYERS, TOP_K)).astype(np.float16),
        "hidden": rng.random((TOKENS, RANK)).astype(np.float16),
        "projection": rng.random((HIDDEN, RANK), np.float32),
        "projection_seed": 0,
        "weights_sha256": "ab12",
    }
    return Trace(**(values | changes))


def without(trace: Trace, *names: str) -> Trace:
    absent: dict[str, Any] = dict.fromkeys(names)
    return replace(trace, **absent)


def same(a: Trace, b: Trace) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(Trace)]
    return all(np.array_equal(x, y) and type(x) is type(y) for x, y in pairs)


@pytest.mark.parametrize("num_experts", [8, 256, 257])
def test_comes_back_as_it_was(tmp_path: Path, num_experts: int) -> None:
    whole = make_trace(num_experts)
    optional = ("token_ids", "weights", "hidden", "projection", "projection_seed", "weights_sha256")
    for trace in (whole, without(whole, *optional)):
        num_bytes = trace.save(tmp_path / "a b.trace")
        assert num_bytes == (tmp_path / "a b.trace").stat().st_size
        assert same(Trace.load(tmp_path / "a b.trace"), trace)
    assert [file.name for file in tmp_path.iterdir()] == ["a b.trace"]
    assert (len(whole), whole.num_sequences, whole.num_layers, whole.top_k) == (7, 2, 3, 2)


def test_numpy_alone_reads_it(tmp_path: Path) -> None:
    trace = make_trace()
    trace.save(tmp_path / "t")
    with np.load(tmp_path / "t", allow_pickle=False) as arrays:
        assert str(arrays["format"]) == "seqmoe-trace" and int(arrays["format_version"]) == 1
        assert str(arrays["model"]) == "tïny"
        assert arrays["experts"].dtype == np.uint8
        assert np.array_equal(arrays["experts"], trace.experts)
        assert set(arrays) == {"format", "format_version", *(f.name for f in fields(Trace))}


def test_the_same_bytes_at_any_time(tmp_path: Path) -> None:
    make_trace().save(tmp_path / "a")
    make_trace().save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    dates = {entry.date_time for entry in zipfile.ZipFile(tmp_path / "a").infolist()}
    assert dates == {(1980, 1, 1, 0, 0, 0)}


def test_a_selection_keeps_rows_together() -> None:
    trace = make_trace()
    part = trace.select(trace.phase == 1)
    assert part.sequence.tolist() == [0, 0, 1, 1] and part.num_sequences == 2
    assert np.array_equal(part.experts, trace.experts[[2, 3, 5, 6]])
    assert part.hidden is not None and trace.hidden is not None
    assert np.array_equal(part.hidden, trace.hidden[[2, 3, 5, 6]])
    assert trace.select(trace.phase == 9).num_sequences == 0


ONES = np.ones((TOKENS, LAYERS, TOP_K), np.uint8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 300}, "experts is uint8"),
        ({"experts": ONES[0]}, "experts is uint8 [3, 2]"),
        ({"experts": ONES}, "the same expert"),
        ({"num_experts": 7, "experts": ONES * [0, 7] + 0}, "experts is int64"),
        ({"num_experts": 7, "experts": ONES * np.array([0, 7], np.uint8)}, "expert 7 of 7"),
        ({"sequence": np.zeros(3, np.uint32)}, "sequence is uint32 [3]"),
        ({"sequence": np.arange(TOKENS, dtype=np.uint32)[::-1]}, "sequence decreases"),
        ({"phase": np.full(TOKENS, 2, np.uint8)}, "phase 2"),
        ({"token_ids": np.zeros(TOKENS)}, "token_ids is float64"),
        ({"weights": np.zeros(TOKENS, np.float16)}, "weights is float16 [7]"),
        ({"hidden": None}, "belong together"),
        ({"projection_seed": None}, "belong together"),
        ({"projection": np.zeros((HIDDEN, 3), np.float32)}, "hidden is float16 [7, 4]"),
        ({"projection": np.zeros(3, np.float32)}, "is float"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as made:
        make_trace(**changes)
    assert words in str(made.value)
    arrays = make_trace()._arrays() | {k: v for k, v in changes.items() if v is not None}
    for name in [k for k, v in changes.items() if v is None]:
        del arrays[name]
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(TraceError) as loaded:
        Trace.load(tmp_path / "bad.npz")
    assert words in loaded.value.message and "bad.npz" in loaded.value.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": np.array("other")}, "not written by seqmoe"),
        ({"format_version": np.array(2)}, "format version 2"),
        ({"format_version": np.array("one")}, "no usable trace"),
        ({"num_experts": np.zeros(3, int)}, "no usable trace"),
        ({"experts": np.array([None])}, "no usable trace"),
    ],
)
def test_other_files_of_arrays_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "bad.npz", **(make_trace()._arrays() | change))
    with pytest.raises(TraceError, match=words):
        Trace.load(tmp_path / "bad.npz")


@pytest.mark.parametrize("name", ["format", "format_version", "experts", "sequence", "model"])
def test_what_is_missing_is_named(name: str, tmp_path: Path) -> None:
    arrays: dict[str, Any] = make_trace()._arrays()
    del arrays[name]
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(TraceError, match=f"{name} is missing|seqmoe|version None"):
        Trace.load(tmp_path / "bad.npz")


def test_files_that_are_no_zip(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "empty").touch()
    for name in ("a.npy", "empty", "missing", "."):
        with pytest.raises(TraceError) as error:
            Trace.load(tmp_path / name)
        assert str(tmp_path / name) in error.value.message and error.value.hint


def test_damage_is_never_read_as_routing(tmp_path: Path) -> None:
    trace, path, chance = make_trace(), tmp_path / "t", random.Random(3)
    trace.save(path)
    whole = path.read_bytes()
    refused = 0
    for _ in range(400):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            found = Trace.load(path)
        except TraceError:
            refused += 1
        else:  # no harm done, or a part that may be absent has lost its name
            assert same(found, without(trace, *(k for k, v in vars(found).items() if v is None)))
    assert refused > 200


def test_a_write_that_breaks_off_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    path.write_text("old")
    write = module._write_array

    def interrupted(file: zipfile.ZipFile, name: str, array: Any) -> None:
        write(file, name, array)
        if name == "sequence":
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write_array", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_trace().save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["t"]
    assert path.read_text() == "old"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SeqmoeError, match=r"cannot write .*no/t"):
        make_trace().save(tmp_path / "no" / "t")
