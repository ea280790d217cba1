"""python -m tools.simulator: the published figures, every format, traces of all kinds, errors."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from seqmoe_cli.forecast.trace import Trace
from tests.chat.screen import Program
from tests.traces import random_trace
from tools.simulator.__main__ import main

MEASURED = "--step-ms 1.69 --fetch-gb 49 --launch-us 0.8"
SMALL = ["--pool", "45%", "--policy", "lru,belady"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A trace of 30 tokens, the first ten of them a prompt, in a file called t."""
    trace = random_trace(0, 30, 4, 16, 2)
    phase = (np.arange(30) >= 10).astype(np.uint8)
    Trace("tiny", "none", 16, trace.experts, trace.sequence, phase).save(tmp_path / "t")
    return tmp_path / "t"


def simulate(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code = main(list(argv))
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def test_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["qwen3", "--pool", "25%,45%", "--policy", "lru,belady", "--skip", "64", "-o", "jsonl"]
    rows = [json.loads(line) for line in simulate(capsys, *argv).splitlines()]
    assert [(row["pool"], row["policy"]) for row in rows] == [
        ("25%", "lru"), ("25%", "belady"), ("45%", "lru"), ("45%", "belady"),
    ]  # fmt: skip
    assert [round(100 * row["hit_rate"], 1) for row in rows] == [82.0, 92.5, 96.5, 96.8]
    assert [row["loads_per_token"] for row in rows] == pytest.approx(
        [51.9, 21.7, 10.1, 9.3], abs=0.1
    )
    assert [row["gap_recovered"] for row in rows] == [0, 1, 0, 1]
    first = rows[0]
    assert (first["num_slots"], first["num_tokens"]) == (1536, 64)
    assert first["num_lookups"] == 64 * 48 * 6 == first["num_hits"] + first["num_loads"]
    assert first["loaded_bytes"] == first["num_loads"] * 4_722_688
    fetch_ms = 4_722_688 / 48e6
    assert first["stall_ms"] == pytest.approx(first["loads_per_token"] * fetch_ms, rel=0.02)
    assert first["share_of_full_load"] == pytest.approx(1.7 / (1.7 + first["stall_ms"]))


def test_prefetch_levels(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["qwen3", "--pool", "45%", "--policy", "forecast", "--skip", "64", "-o", "json"]
    rows = json.loads(
        simulate(
            capsys,
            *argv,
            "--prefetch",
            "off,lookahead,full,oracle",
            "--recall",
            "0.9",
            "--rare",
            "1",
        )
    )
    stalls = [row["stall_ms"] for row in rows]
    assert stalls == sorted(stalls, reverse=True) and len(set(stalls)) == 4
    assert [row["forecast"] for row in rows] == ["blurred"] * 4
    assert [row["num_prefetches"] > 0 for row in rows] == [False, True, True, True]
    assert all(row["num_used_prefetches"] <= row["num_on_time_hits"] for row in rows)


@pytest.mark.parametrize(
    ("argv", "stall_ms", "on_time", "loads"),
    [
        (f"--pool 45% {MEASURED}", 0.6103, 97.18, 16.57),
        (f"--pool 45% {MEASURED} --delay-us 3", 0.5887, 97.27, 16.70),
        (f"--pool 45% {MEASURED} --in-flight 1", 0.6546, 96.98, 15.20),
        (f"--pool 25% {MEASURED}", 3.6815, 84.92, 53.60),
        ("--pool 45% --prefetch-by thread", 0.8343, 97.30, 15.22),
        ("--pool 45% --prefetch-by thread --delay-us 25 --slack 1", 0.7663, 97.59, 18.03),
        ("--pool 25% --prefetch-by thread", 4.4667, 85.21, 51.59),
    ],
)
def test_prefetch_by_gpu_and_by_thread(
    argv: str, stall_ms: float, on_time: float, loads: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures that stay as they are."""
    usual = "qwen3 --skip 64 --policy decayed --prefetch lookahead"
    [row] = json.loads(simulate(capsys, *usual.split(), *argv.split(), "-o", "json"))
    assert row["prefetch_by"] == ("thread" if "thread" in argv else "gpu")
    assert row["stall_ms"] == pytest.approx(stall_ms, abs=1e-4)
    assert 100 * row["on_time_hit_rate"] == pytest.approx(on_time, abs=0.01)
    assert row["loads_per_token"] == pytest.approx(loads, abs=0.01)
    moved = row["loaded_bytes"] / row["num_tokens"] / 4_722_688
    assert moved == pytest.approx(row["loads_per_token"])
    whole = row["num_loads"] / row["num_tokens"]
    assert row["loads_per_token"] == whole or (row["prefetch_by"] == "gpu" and moved < whole)


def test_what_copies_is_said(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(small), *SMALL, "--prefetch", "off,lookahead"]
    assert (
        "\nprefetches by gpu, at most 2 under way, at 40 GB/s, 12 us after the request\n"
        in simulate(capsys, *argv, "--fetch-gb", "40")
    )
    assert (
        "\nprefetches by thread, at most 2 under way, at 52 GB/s, 40 us after the request\n"
        in simulate(capsys, *argv, "--fetch-gb", "40", "--prefetch-by", "thread")
    )
    rows = json.loads(simulate(capsys, *argv, "-o", "json"))
    assert [row["prefetch_by"] for row in rows] == ["", "gpu"] * 2


def test_the_same_rows_in_every_format(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_json = json.loads(simulate(capsys, str(small), *SMALL, "-o", "json"))
    lines = simulate(capsys, str(small), *SMALL, "-o", "jsonl").splitlines()
    assert [json.loads(line) for line in lines] == as_json
    table = csv.DictReader(io.StringIO(simulate(capsys, str(small), *SMALL, "-o", "csv")))
    assert [{k: str(v) for k, v in row.items()} for row in as_json] == list(table)
    page = simulate(capsys, str(small), *SMALL)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()[:4]]
    assert cells[0][:4] == ["trace", "pool", "policy", "prefetch"]
    assert [row[2] for row in cells[2:]] == ["lru", "belady"]
    assert [row[6] for row in cells[2:]] == [f"{row['loads_per_token']:.1f}" for row in as_json]
    assert page.endswith(
        "a token without misses 1.7 ms; an expert 4,722,688 bytes, fetched at 48 GB/s\n"
    )


def test_which_tokens_count(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def tokens(*argv: str) -> tuple[int, int]:
        [row] = json.loads(
            simulate(capsys, str(small), "--pool", "all", "--policy", "lru", "-o", "json", *argv)
        )
        return row["num_tokens"], row["num_loads"]

    used = len(np.unique(Trace.load(small).experts[10:] + 16 * np.arange(4)[:, None]))
    assert tokens() == (20, used)  # a pool for all experts loads each of them once
    assert tokens("--prompts")[0] == 30
    assert tokens("--skip", "5")[0] == 15
    assert tokens("--tokens", "7") == (7, tokens("--tokens", "7")[1])
    assert tokens("--tokens", "7")[1] < used


def test_several_traces_and_simulated_knowledge(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = simulate(
        capsys, str(small), str(small), "--pool", "20slots", "--policy", "forecast,window,s3fifo",
        "--prefetch", "full", "--forecast", "decayed", "--window", "3", "--look-ahead", "0.8/0.5",
    )  # fmt: skip
    rows = [line.split("|") for line in page.splitlines() if line.startswith("|")][2:]
    assert [row[3].strip() for row in rows] == ["forecast", "window 3", "s3fifo"] * 2
    assert (
        "simulated look-ahead: recall of misses/precision 1 to 1 layers ahead 80.0/50.0 %" in page
    )
    assert "forecast: decayed" in page


def test_on_a_terminal(small: Path) -> None:
    program = Program([sys.executable, "-m", "tools.simulator", str(small), *SMALL])
    assert program.finish() == 0
    text = "\n".join(program.screen.lines)
    assert "policy" in text and "belady" in text and "1.7 ms" in text and "|" not in text


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["qwen4"], 1, "qwen4"),
        (["qwen3", "--pool", "auto"], 2, "--pool"),
        (["qwen3", "--pool", "5slots"], 1, "6 experts"),
        (["qwen3", "--policy", "lru,best"], 2, "best"),
        (["qwen3", "--prefetch", "on"], 2, "--prefetch"),
        (["qwen3", "--prefetch-by", "dma"], 2, "--prefetch-by"),
        (["qwen3", "--dma-gb", "50"], 2, "--dma-gb has no effect on copies by gpu"),
        (["qwen3", "--prefetch-by", "gpu", "--slack", "0"], 2, "--slack has no effect"),
        (["qwen3", "--in-flight", "0"], 2, "--in-flight"),
        (["qwen3", "--forecast", "x"], 2, "--forecast"),
        (["qwen3", "-o", "xml"], 2, "-o"),
        (["qwen3", "--recall", "0.5,0.4"], 2, "2 numbers"),
        (["qwen3", "--recall", "1.5"], 2, "1.5"),
        (["qwen3", "--look-ahead", "0.7"], 2, "0.75/0.68"),
        (["qwen3", "--step-ms", "0"], 2, "--step-ms"),
        (["qwen3", "--skip", "128"], 1, "128 tokens"),
        ([__file__], 1, "test_command.py"),
    ],
)
def test_errors(argv: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == "" and words in err and len(err.splitlines()) <= 2
