"""The residency curve: which rows become points of which line, and a picture when matplotlib is
there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plot import Point, curves, draw, read_rows
from seqmoe_cli.main import main


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same rows as `seqmoe bench` prints them and as a record of the GPU check."""
    folder = tmp_path_factory.mktemp("plot")
    argv = ["bench", "--shape", "tiny", "--device", "cpu", "-p", "4", "-n", "3", "-r", "2"]
    with (folder / "bench.json").open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", file)
        assert main([*argv, "--pool", "all,50%", "-o", "json"]) == 0
    rows = json.loads((folder / "bench.json").read_text())
    (folder / "record.json").write_text(json.dumps({"full-size": {"rows": rows}}))
    return [folder / "bench.json", folder / "record.json"]


def test_a_line_of_warm_generation(files: list[Path]) -> None:
    rows = read_rows(files[0])
    assert read_rows(files[1]) == rows
    kept: list[dict[str, Any]] = [r for r in rows if r["n_gen"] and r["state"] == "warm"]
    [(name, points)] = curves(rows).items()
    assert name.startswith("tiny, random weights, its own routing (tg3")
    assert [point.share for point in points] == [50, 100]
    assert points == sorted(Point(100 * r["pool_share"], r["avg_ts"], r["stddev_ts"]) for r in kept)


def test_replayed_rows_are_a_line_of_their_own(files: list[Path]) -> None:
    rows = read_rows(files[0])
    traced = [r | {"trace": "qwen3"} for r in rows if r["n_gen"] and r["state"] == "cold"]
    names = list(curves([*rows, *traced]))
    assert len(names) == 2 and any("routing of trace qwen3" in name for name in names)


def test_picture(files: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(curves(read_rows(files[0])), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
