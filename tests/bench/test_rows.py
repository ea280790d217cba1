"""Rows and the four output formats, from samples made by hand."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator

import pytest

from seqmoe_cli.bench.matrix import Case
from seqmoe_cli.bench.output import FORMATS
from seqmoe_cli.bench.rows import Row, Sample, Setting, make_row

SETTING = Setting(
    model_filename="tiny",
    model_type="mixtral F32",
    model_size=3 * 2**30,
    model_n_params=1_500_000_000,
    device="cpu",
    dtype="float32",
    pool="45%",
    pool_bytes=1024,
    num_slots=11,
    n_ctx=64,
    sampling="greedy",
    prompt_source='a "quoted", text.txt',
    cpu_info="a processor",
    gpu_info="",
    driver="",
    torch="2",
    triton="3",
    build_commit="abc1234",
    fallbacks=["no usable CUDA device: computing on the CPU"],
)
SAMPLES = [
    Sample(elapsed_ns=2_000_000_000, num_tokens=8, hits=30, misses=10, fetched_bytes=4_000),
    Sample(elapsed_ns=1_000_000_000, num_tokens=8, hits=36, misses=4, fetched_bytes=2_000),
]


def rows() -> list[Row]:
    time = "2026-01-02T03:04:05Z"
    return [
        make_row(SETTING, Case(0, 8, 16), "cold", time, SAMPLES),
        make_row(SETTING, Case(8, 0, 0), "warm", time, SAMPLES[:1]),
    ]


def test_sums_of_a_row() -> None:
    row = rows()[0]
    assert row.samples_ts == [4.0, 8.0]
    assert row.avg_ts == 6.0
    assert row.stddev_ts == pytest.approx(8**0.5)
    assert (row.avg_ns, row.stddev_ns) == (1_500_000_000, 707_106_781)
    assert row.hit_rate == 66 / 80
    assert row.misses_per_token == 14 / 16
    assert row.bytes_fetched == 3_000
    assert row.fetch_gb_per_s == pytest.approx(6_000 / 3e9)


def test_one_repetition_has_no_deviation() -> None:
    row = rows()[1]
    assert (row.stddev_ns, row.stddev_ts) == (0, 0.0)


def test_json_is_one_array_of_flat_objects() -> None:
    lines = list(FORMATS["json"](rows()))
    found = json.loads("\n".join(lines))
    assert [row["test"] for row in found] == ["tg8 @ d16", "pp8"]
    llama_bench = (
        "n_prompt n_gen n_depth avg_ts stddev_ts samples_ts samples_ns avg_ns stddev_ns test_time "
        "build_commit gpu_info cpu_info model_filename model_type model_size model_n_params"
    )
    ours = (
        "hit_rate misses_per_token bytes_fetched pool_bytes num_slots state prompt_source driver "
        "torch triton device dtype"
    )
    assert set(f"{llama_bench} {ours}".split()) <= set(found[0])
    assert not any(isinstance(value, dict) for value in found[0].values())


def test_jsonl_gives_a_line_as_soon_as_its_row_is_there() -> None:
    asked = []

    def source() -> Iterator[Row]:
        for row in rows():
            asked.append(row.test)
            yield row

    lines = FORMATS["jsonl"](source())
    assert json.loads(next(lines))["state"] == "cold"
    assert asked == ["tg8 @ d16"]
    assert json.loads(next(lines))["state"] == "warm"


def test_csv_holds_the_same_as_json() -> None:
    table = list(csv.DictReader(FORMATS["csv"](rows())))
    objects = json.loads("".join(FORMATS["json"](rows())))
    assert [list(row) for row in table] == [list(row) for row in objects]
    assert table[0]["prompt_source"] == SETTING.prompt_source
    assert json.loads(table[0]["samples_ts"]) == [4.0, 8.0]


def test_markdown_aligns_text_left_and_numbers_right() -> None:
    lines = list(FORMATS["md"](rows()))
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
    assert "greedy" in under and "abc1234" in under and "no usable CUDA device" in under


@pytest.mark.parametrize(("name", "expected"), [("md", 0), ("csv", 0), ("jsonl", 0), ("json", 1)])
def test_no_rows(name: str, expected: int) -> None:
    assert len(list(FORMATS[name]([]))) == expected
