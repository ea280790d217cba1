"""Rows and the four output formats, from samples made by hand."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seqmoe_cli.bench.matrix import Case
from seqmoe_cli.bench.output import report
from seqmoe_cli.bench.rows import PREFETCH, TIMES, Measured, Sample
from seqmoe_cli.residency.stats import StepStats
from seqmoe_cli.terminal.table import PLAIN

SETTING: dict[str, Any] = {
    "model_filename": "tiny",
    "model_type": "mixtral F32",
    "weights": "packed",
    "model_size": 3 * 2**30,
    "model_n_params": 1_500_000_000,
    "n_expert": 8,
    "n_expert_used": 2,
    "trace": "",
    "device": "cpu",
    "dtype": "float32",
    "pool": "45%",
    "pool_bytes": 1024,
    "num_slots": 11,
    "pool_share": 0.45,
    "n_ctx": 64,
    "verify": False,
    "policy": "lru",
    "prefetch": "off",
    "prefetch_by": "",
    "look_ahead": "",
    "predictor": "",
    "sampling": "greedy",
    "prompt_source": 'a "quoted", text.txt',
    "cpu_info": "a processor",
    "gpu_info": "",
    "driver": "",
    "torch": "2",
    "triton": "3",
    "build_commit": "abc1234",
    "copy_gb_per_s": None,
    "link_gb_per_s": None,
    "fallbacks": ["no usable CUDA device: computing on the CPU"],
}
SAMPLES = [
    Sample(2_000_000_000, StepStats("decode", 8, 30, 10, 4_000, 2.0, 0.5, 1.7, 0.2)),
    Sample(1_000_000_000, StepStats("decode", 8, 36, 4, 2_000, 1.0, 0.1, 0.7, 0.2)),
]


def measured(case: Case, *samples: Sample, **more: Any) -> Measured:
    return Measured(case, "cold", samples or SAMPLES, **more)


def rows() -> list[dict[str, Any]]:
    time = "2026-01-02T03:04:05Z"
    return [
        Measured(Case(0, 8, 16, 1), "cold", SAMPLES, bytes_read=9_000_000).row(SETTING, time),
        Measured(Case(8, 0, 0), "warm", SAMPLES[:1]).row(SETTING, time),
    ]


def test_sums_of_a_row() -> None:
    row = rows()[0]
    assert row["samples_ts"] == [4.0, 8.0]
    assert row["avg_ts"] == 6.0
    assert row["stddev_ts"] == pytest.approx(8**0.5)
    assert (row["avg_ns"], row["stddev_ns"]) == (1_500_000_000, 707_106_781)
    assert row["hit_rate"] == 66 / 80
    assert row["misses_per_token"] == 14 / 16
    assert row["bytes_fetched"] == 3_000
    assert row["fetch_gb_per_s"] == pytest.approx(6_000 / 3e9)


def test_where_the_time_goes() -> None:
    setting = SETTING | {"copy_gb_per_s": 0.5, "link_gb_per_s": 2e-5}
    done = measured(Case(0, 8, 16, 1), bytes_read=9_000_000, num_kernels=33)
    row = done.row(setting, "", full_ts=8.0)
    assert row["ms_per_token"] == pytest.approx(3000 / 16)
    assert row["compute_ms"] == pytest.approx((2400 - 600) / 16)
    assert row["stall_ms"] == pytest.approx(600 / 16)
    assert row["gap_ms"] == pytest.approx(400 / 16)
    assert row["bytes_read_per_token"] == 9_000_000
    assert row["read_gb_per_s"] == pytest.approx(9e6 * 16 / 1.8 / 1e9)
    assert row["share_of_copy"] == pytest.approx(0.16)
    assert row["stall_gb_per_s"] == pytest.approx(6_000 / 0.6 / 1e9)
    assert row["share_of_link"] == pytest.approx(0.5)
    assert (row["share_of_full_load"], row["kernels_per_token"]) == (0.75, 33)


@pytest.mark.parametrize(
    ("plain_step_s", "copies", "saved", "pays", "words"),
    [
        (0.2, 20, 0.25, True, "25.0 % shorter than without; a chat would leave it on"),
        (0.2, 60, 0.25, False, "25.0 % shorter than without; a chat would turn it off"),
        (0.1, 20, -0.5, False, "50.0 % longer than without; a chat would turn it off"),
    ],
)
def test_what_prefetch_saves(
    plain_step_s: float, copies: int, saved: float, pays: bool, words: str
) -> None:
    """A step takes 0.15 s; too many copies for those used are not worth it."""
    setting = SETTING | {"prefetch": "lookahead", "pool_bytes": 1100}
    asked = {"prefetches": copies, "prefetch_hits": 8, "prefetches_late": 1}
    sample = replace(SAMPLES[0], total=replace(SAMPLES[0].total, step_s=1.2, **asked))
    done = measured(Case(0, 8, 0, 1), sample, accuracy=[(9, 8, 5)])
    row = done.row(setting, "", plain_step_s=plain_step_s)
    assert row["prefetch_saved"] == pytest.approx(saved)
    assert row["prefetch_pays"] is pays
    assert f"prefetch, pool 45% lookahead, cold: a step is {words}" in report([row])
    alone = done.row(setting, "")
    assert alone["prefetch_saved"] is alone["prefetch_pays"] is None
    assert not [line for line in report([alone]) if "a chat would" in line]


def test_what_cannot_be_said_is_none() -> None:
    generated, prompt = rows()
    assert generated["share_of_full_load"] is None
    assert generated["share_of_copy"] is generated["share_of_link"] is None
    assert {prompt[key] for key in (*TIMES, *PREFETCH, "eviction_saved_misses")} == {None}
    hits = StepStats("decode", 8, 40, 0, 0, 2.0, 0.0, 1.7, 0.2)
    all_hit = measured(Case(0, 8, 0, 1), Sample(2 * 10**9, hits)).row(SETTING, "")
    assert (all_hit["stall_ms"], all_hit["stall_gb_per_s"]) == (0.0, None)


def test_one_repetition_has_no_deviation() -> None:
    row = rows()[1]
    assert (row["stddev_ns"], row["stddev_ts"]) == (0, 0.0)


def test_json_is_one_array_of_flat_objects() -> None:
    lines = list(PLAIN["json"](rows()))
    found = json.loads("\n".join(lines))
    assert [row["test"] for row in found] == ["tg8 @ d16", "pp8"]
    llama_bench = (
        "n_prompt n_gen n_depth avg_ts stddev_ts samples_ts samples_ns avg_ns stddev_ns test_time "
        "build_commit gpu_info cpu_info model_filename model_type model_size model_n_params"
    )
    ours = (
        "hit_rate misses_per_token bytes_fetched pool_bytes num_slots state prompt_source driver "
        "torch triton device dtype weights trace n_expert n_expert_used n_untimed ms_per_token "
        "verify share_of_full_load compute_ms stall_ms gap_ms bytes_read_per_token read_gb_per_s "
        "share_of_copy stall_gb_per_s share_of_link kernels_per_token copy_gb_per_s link_gb_per_s"
    )
    assert set(f"{llama_bench} {ours}".split()) <= set(found[0])
    assert not any(isinstance(value, dict) for value in found[0].values())


def test_jsonl_gives_a_line_as_soon_as_its_row_is_there() -> None:
    asked = []

    def source() -> Iterator[dict[str, Any]]:
        for row in rows():
            asked.append(row["test"])
            yield row

    lines = PLAIN["jsonl"](source())
    assert json.loads(next(lines))["state"] == "cold"
    assert asked == ["tg8 @ d16"]
    assert json.loads(next(lines))["state"] == "warm"


def test_csv_holds_the_same_as_json() -> None:
    table = list(csv.DictReader(PLAIN["csv"](rows())))
    objects = json.loads("".join(PLAIN["json"](rows())))
    assert [list(row) for row in table] == [list(row) for row in objects]
    assert table[0]["prompt_source"] == SETTING["prompt_source"]
    assert json.loads(table[0]["samples_ts"]) == [4.0, 8.0]


def test_markdown_aligns_text_left_and_numbers_right() -> None:
    lines = list(report(rows()))
    assert len({len(line) for line in lines[:4]}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4]]
    titles = cells[0]
    assert titles[:6] == ["model", "size", "params", "device", "pool", "slots"]
    for title, rule_cell in zip(titles, cells[1], strict=True):
        text = title in ("model", "device", "pool", "test", "state")
        assert rule_cell.startswith(":") == text, title
        assert rule_cell.endswith(":") != text, title
    row = dict(zip(titles, cells[2], strict=True))
    assert row["test"] == "tg8 @ d16"
    assert row["t/s"] == "6.00 ± 2.83"
    assert (row["size"], row["params"]) == ("3.00 GiB", "1.50 B")
    assert (row["hit %"], row["miss/tok"], row["pool"]) == ("82.5", "0.88", "45%")
    assert lines[2].startswith("| tiny ") and "|  82.5 |" in lines[2]
    under = "\n".join(lines[4:])
    assert "random" not in "\n".join(lines) and "routing" not in under
    assert "greedy" in under and "abc1234" in under and "no usable CUDA device" in under


def test_rows_printed_as_they_come_stay_in_line() -> None:
    """A later pool and a later test have longer names than the first."""
    later = SETTING | {"policy": "forecast", "prefetch": "lookahead"}
    long = measured(Case(0, 128, 131072, 1)).row(later, "")
    known = {"pool": ["45%", "45% forecast lookahead"], "test": ["pp8", long["test"]]}
    lines = list(report([*rows(), long], known))[:5]
    assert len({tuple(i for i, c in enumerate(line) if c == "|") for line in lines}) == 1
    assert "| 45% forecast lookahead |" in lines[4] and "| tg128 @ d131072 |" in lines[4]


def test_markdown_shows_where_the_time_goes() -> None:
    setting = SETTING | {"weights": "random", "trace": "qwen3"}
    setting |= {"copy_gb_per_s": 4000.0, "link_gb_per_s": 55.0}
    done = measured(Case(0, 8, 0, 64), bytes_read=9_000_000)
    lines = list(report([done.row(setting, "", full_ts=8)]))
    title = next(i for i, line in enumerate(lines) if line.startswith("where the time goes"))
    assert lines[0].startswith("| model ") and "tiny (random weights)" in lines[2]
    assert "tiny (random weights)" in lines[title]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[title + 2 :]]
    cells = dict(zip(table[0], table[2], strict=True))
    assert cells["% of full load"] == "75.0"
    assert [cells[name] for name in ("ms/tok", "compute", "stall", "gap")] == [
        "187.500", "112.500", "37.500", "25.000"
    ]  # fmt: skip
    assert (cells["MB read/tok"], "kernels/tok" in cells) == ("9.0", False)
    under = "\n".join(lines[title + 5 :])
    assert "weights: random" in under
    assert "trace qwen3, 2 of 8 experts" in under and "64 tokens before" in under
    assert "4,000 GB/s" in under and "55.0 GB/s" in under


def test_no_rows() -> None:
    assert list(report([])) == []
    assert [len(list(PLAIN[name]([]))) for name in ("csv", "jsonl", "json")] == [0, 0, 1]


def test_the_documents_name_every_key() -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    assert not [key for key in rows()[0] if f"`{key}`" not in text]
