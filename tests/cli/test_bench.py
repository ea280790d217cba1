"""seqmoe bench on a tiny model: the matrix, cold and warm rows, the formats, what it refuses."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqmoe_cli.bench.shapes import find_shape
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.forecast.trace import DECODE, Trace
from seqmoe_cli.main import main
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_cli.text.files import shipped_text
from seqmoe_cli.text.tokenizer import Tokenizer
from seqmoe_weights.memory import available_host_bytes
from tests.checkpoints import packed_model
from tools.simulator.policies import lru
from tools.simulator.replay import replay

CPU = ["--device", "cpu", "--dtype", "float32"]
Packed = Callable[..., Path]


@pytest.fixture
def bench(packed: Packed, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `seqmoe bench` on a tiny Qwen3-MoE and gives its stdout; nothing may be on stderr."""

    def run(*argv: str) -> str:
        code = main(["bench", str(packed("qwen3_moe")), *CPU, *argv])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    return run


@pytest.fixture
def rows(bench: Callable[..., str]) -> Callable[..., list[dict[str, Any]]]:
    """The rows that `seqmoe bench -o json` prints."""
    return lambda *argv: json.loads(bench("-o", "json", *argv))


def test_lists_make_the_cross_product(rows: Callable[..., list[dict[str, Any]]]) -> None:
    found = rows("-p", "16,24", "-n", "6", "-d", "0,5", "--pool", "5slots,50%", "-r", "2")
    assert [(r["pool"], r["test"], r["state"]) for r in found] == [
        (pool, test + depth, state)
        for pool, depth, test, state in itertools.product(
            ("5slots", "50%"), ("", " @ d5"), ("pp16", "pp24", "tg6"), ("cold", "warm")
        )
    ]
    assert {(r["pool"], r["num_slots"]) for r in found} == {("5slots", 5), ("50%", 12)}
    for r in found:
        assert len(r["samples_ns"]) == len(r["samples_ts"]) == 2
        assert r["avg_ts"] == pytest.approx(sum(r["samples_ts"]) / 2)
        tokens = r["n_prompt"] + r["n_gen"]
        assert r["samples_ts"] == [tokens * 1e9 / ns for ns in r["samples_ns"]]
        assert r["n_ctx"] == 5 + 24 + 1


def test_what_a_row_says_of_model_and_machine(
    packed: Packed, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    (row,) = rows("-p", "4", "-n", "0", "-r", "1", "--no-warmup", "--pool", "4slots")
    folder = packed("qwen3_moe")
    weights = [file for file in folder.iterdir() if file.suffix in (".bin", ".safetensors")]
    assert row["model_filename"] == folder.name
    assert row["model_type"] == "qwen3_moe BF16"
    assert row["model_size"] == sum(file.stat().st_size for file in weights)
    assert (row["device"], row["dtype"]) == ("cpu", "float32")
    assert row["pool_bytes"] == 4 * folder.joinpath("experts-00000.bin").stat().st_size // 8
    assert row["prompt_source"] == "seqmoe_cli/data/aesop_fables.txt"
    assert row["sampling"].startswith("temperature 0.7, top-k 20") and "seed 0" in row["sampling"]
    assert row["gpu_info"] == row["driver"] == ""
    assert row["cpu_info"] and row["torch"] and row["build_commit"] and row["test_time"]
    assert row["fallbacks"] == []


def test_a_warm_pool_hits_more_often_than_a_cold_one(
    rows: Callable[..., list[dict[str, Any]]],
) -> None:
    found = rows("-p", "32", "-n", "12", "-d", "3", "-r", "1", "--pool", "14slots,all")
    pairs = {(r["pool"], r["test"], r["state"]): r for r in found}
    for pool, test in itertools.product(("14slots", "all"), ("pp32 @ d3", "tg12 @ d3")):
        cold, warm = pairs[pool, test, "cold"], pairs[pool, test, "warm"]
        if (pool, test) != ("14slots", "pp32 @ d3"):  # every layer wants all: LRU keeps none
            assert cold["hit_rate"] < warm["hit_rate"]
            assert cold["misses_per_token"] > warm["misses_per_token"]
            assert cold["bytes_fetched"] > warm["bytes_fetched"]
        if pool == "all":
            assert (warm["hit_rate"], warm["bytes_fetched"]) == (1.0, 0)


def test_cold_rows_count_what_the_engine_counts(
    packed: Packed, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    found = rows("-p", "20", "-n", "6", "-d", "7", "-r", "2", "--pool", "14slots", "--no-warmup")
    assert found[1]["n_untimed"] == 1
    folder = packed("qwen3_moe")
    ids = Tokenizer.open(folder).encode(shipped_text()[0])
    greedy = SamplingParams(temperature=0)
    engine = Engine.open(
        folder, EngineOptions(PoolSize.parse("14slots"), "cpu", "float32", ctx_size=64)
    )
    list(engine.generate(ids[:7], greedy, max_tokens=1, stop_ids=()))
    engine.reset_pool()
    (step,) = engine.generate(ids[:27], greedy, max_tokens=1, stop_ids=())
    engine.close()
    assert [r["test"] for r in found] == ["pp20 @ d7", "tg6 @ d7"]
    assert found[0]["hit_rate"] == step.stats.hit_rate
    assert found[0]["misses_per_token"] == step.stats.misses / 20
    assert found[0]["bytes_fetched"] == step.stats.fetched_bytes
    looked_up = 3 * 2  # layers, experts of each that a token uses
    assert found[1]["misses_per_token"] == pytest.approx(looked_up * (1 - found[1]["hit_rate"]))


def test_other_formats_hold_the_same_rows(bench: Callable[..., str]) -> None:
    argv = ["-p", "4,8", "-n", "0", "-r", "1", "--no-warmup"]
    lines = [json.loads(line) for line in bench("-o", "jsonl", *argv).splitlines()]
    assert [row["test"] for row in lines] == ["pp4", "pp8"]
    table = list(csv.DictReader(bench("-o", "csv", *argv).splitlines()))
    assert [row["test"] for row in table] == ["pp4", "pp8"]
    assert list(table[0]) == list(lines[0])
    markdown = bench(*argv).splitlines()
    assert [line.split("|")[7].strip() for line in markdown[2:4]] == ["pp4", "pp8"]
    assert not any(line.startswith("where the time goes") for line in markdown)


def test_prompt_file(packed: Packed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes("Ein Text über Füchse.\r\n".encode())
    folder = packed("qwen3_moe")
    num_tokens = len(Tokenizer.open(folder).encode(text.read_bytes().decode()))
    argv = ["bench", str(folder), *CPU, "-n", "0", "-r", "1", "--no-warmup", "-o", "jsonl"]
    argv += ["--prompt-file", str(text), "-p"]
    assert main([*argv, str(num_tokens)]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_source"] == str(text)
    assert main([*argv, str(num_tokens + 1)]) == 1
    out, err = capsys.readouterr()
    assert not out and str(text) in err and f"has {num_tokens}" in err and "--prompt-file" in err


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["-p", "x"], ["-p 'x'"]),
        (["-p", ""], ["-p ''"]),
        (["-n", "-3"], ["-n", "-3"]),
        (["-d", "1e3"], ["-d '1e3'"]),
        (["-p", "0", "-n", "0"], ["-p", "-n"]),
        (["-r", "0"], ["-r 0"]),
        (["-r", "nan"], ["-r", "nan"]),
        (["-o", "xml"], ["-o 'xml'", "jsonl"]),
        (["--pool", "45%,lots"], ["--pool 'lots'"]),
        (["--pool", ""], ["--pool ''"]),
        (["--vram", "nan"], ["--vram nan"]),
        (["--device", "tpu"], ["--device 'tpu'"]),
        (["--dtype", "int8"], ["--dtype 'int8'"]),
        (["--shape", "tiny"], ["--shape tiny", "/no/such/model"]),
        (["--trace", "qwen3", "-p", "5"], ["-p", "--trace"]),
    ],
)
def test_usage_errors_come_before_the_model_is_looked_for(
    argv: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "/no/such/model", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(name in err for name in names), err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("argv", "code", "names"),
    [
        (["-d", "2000"], 1, ["pp512 @ d2000", "2,513", "2,048"]),
        (["--pool", "all,1slots"], 1, ["--pool 1slots", "2slots"]),
        (["--pool", "all", "--vram", "0.001"], 1, ["--vram"]),
        (["--prompt-file", "/no/such/text"], 1, ["--prompt-file /no/such/text cannot be read"]),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_measured(
    packed: Packed,
    argv: list[str],
    code: int,
    names: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", str(packed("qwen3_moe")), *CPU, *argv]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert all(name in err for name in names), err
    assert len(err.splitlines()) <= 2


@pytest.fixture
def shaped(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    """The rows of `seqmoe bench --shape tiny -o json`."""

    def run(*argv: str) -> list[dict[str, Any]]:
        code = main(["bench", "--shape", "tiny", *CPU, "-o", "json", *argv])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        rows: list[dict[str, Any]] = json.loads(out)
        return rows

    return run


def test_a_shape_is_measured_without_a_model(shaped: Callable[..., list[dict[str, Any]]]) -> None:
    found = shaped("-p", "8", "-n", "5", "-r", "2", "--pool", "25%,all")
    assert [(r["pool"], r["test"], r["state"]) for r in found] == [  # all of them come first
        *itertools.product(("all", "25%"), ("pp8", "tg5"), ("cold", "warm"))
    ]
    for row in found:
        assert (row["model_filename"], row["weights"]) == ("tiny", "random")
        assert "random weights" in row["model_type"]
        assert row["prompt_source"] == "random token ids"
        assert (row["n_expert"], row["n_expert_used"], row["trace"]) == (16, 4, "")
        assert row["copy_gb_per_s"] is row["share_of_link"] is row["kernels_per_token"] is None
    pairs = {(r["pool"], r["test"], r["state"]): r for r in found}
    for test in ("pp8", "tg5"):
        full = pairs["all", test, "warm"]
        assert (full["share_of_full_load"], full["misses_per_token"]) == (1.0, 0.0)
        assert pairs["all", test, "cold"]["share_of_full_load"] is None
        for state in ("cold", "warm"):
            row = pairs["25%", test, state]
            assert row["share_of_full_load"] == row["avg_ts"] / full["avg_ts"]
    row = pairs["25%", "tg5", "cold"]
    assert row["misses_per_token"] > 0 and row["stall_ms"] > 0
    in_device_time = row["compute_ms"] + row["stall_ms"] + row["gap_ms"]
    assert in_device_time == pytest.approx(row["ms_per_token"], rel=0.5)
    assert pairs["25%", "pp8", "cold"]["compute_ms"] is None


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two answers, from a packed model with the layers and experts of `tiny`."""
    folder = tmp_path_factory.mktemp("recorded")
    shape = {"num_hidden_layers": 6, "num_experts": 16, "num_experts_per_tok": 3}
    model = packed_model(folder, "qwen3_moe", **shape)
    (folder / "prompts.json").write_text('["Hello", ["Hello you", "And then?"]]')
    argv = ["trace", str(model), *CPU, "--prompts", str(folder / "prompts.json"), "-n", "7"]
    assert main([*argv, "-o", str(folder / "OUT")]) == 0
    trace = Trace.load(folder / "OUT")
    assert (trace.phase == DECODE).sum() > 12
    return folder / "OUT"


@pytest.mark.parametrize("num_timed", [None, 9])
def test_replayed_misses_are_those_of_the_simulator(
    recorded: Path,
    num_timed: int | None,
    shaped: Callable[..., list[dict[str, Any]]],
) -> None:
    trace = Trace.load(recorded)
    trace = trace.select(trace.phase == DECODE)
    flags = [] if num_timed is None else ["-n", str(num_timed)]
    found = shaped("--trace", str(recorded), *flags, "-r", "2", "--pool", "4slots,25%,45%,all")
    timed = num_timed or len(trace) // 2
    assert [(r["pool"], r["state"], r["num_slots"]) for r in found] == [
        ("all", "warm", 96),
        ("4slots", "cold", 4),
        ("25%", "cold", 24),
        ("45%", "cold", 43),
    ]
    assert found[0]["misses_per_token"] == 0
    for row in found[1:]:
        simulated = replay(trace, row["num_slots"], lru)
        assert row["misses_per_token"] == simulated.loads_per_token(slice(-timed, None)) > 0
    for row in found:
        assert (row["test"], row["n_untimed"]) == (f"tg{timed}", len(trace) - timed)
        assert (row["trace"], row["n_expert_used"]) == (str(recorded), 3)
        assert row["share_of_full_load"] == row["avg_ts"] / found[0]["avg_ts"]
        assert row["pool_share"] == row["num_slots"] / 96


def test_prefetch_beside_none(recorded: Path, shaped: Callable[..., list[dict[str, Any]]]) -> None:
    """Simulated look-ahead for a trace: the rows say so; a pool of all experts has none."""
    found = shaped("--trace", str(recorded), "-r1", "--pool=45%,all", "--prefetch=off,lookahead")
    kinds = [(r["pool"], r["prefetch"], r["look_ahead"]) for r in found]
    assert kinds == [("all", "off", ""), ("45%", "off", ""), ("45%", "lookahead", "simulated")]
    assert found[1]["look_ahead_recall"] is None
    assert found[2]["bytes_prefetched"] > 0 == found[1]["bytes_prefetched"]
    assert len(found[2]["look_ahead_precision"]) == 4 and found[2]["look_ahead_recall"][0] > 0.5


def test_the_first_use_of_an_expert_misses_wherever_it_lies(
    recorded: Path, shaped: Callable[..., list[dict[str, Any]]]
) -> None:
    """Without a warm-up also the pool of all experts is cold; a context before changes nothing."""
    trace = Trace.load(recorded)
    simulated = replay(trace.select(trace.phase == DECODE), 96, lru)
    for depth in ("0", "7"):
        (row,) = shaped("--trace", str(recorded), "--pool", "all", "-d", depth, "--no-warmup")
        assert row["state"] == "cold" and row["share_of_full_load"] is None
        timed = row["n_gen"]
        assert row["misses_per_token"] == simulated.loads_per_token(slice(-timed, None))


@pytest.mark.parametrize(
    ("argv", "code", "names"),
    [
        ([], 2, ["MODEL", "--shape", "tiny", "mixtral-8x7b"]),
        (["--shape", "huge"], 2, ["--shape 'huge'", "tiny"]),
        (["--shape", "tiny", "--prompt-file", "x"], 2, ["--prompt-file", "--shape"]),
        (["--shape", "tiny", "--trace", "qwen9"], 1, ["'qwen9'", "qwen3"]),
        (["--shape", "tiny", "--trace", "qwen3", "-n", "128"], 1, ["-n 128", "1 to 127"]),
        (["--shape", "tiny", "--trace", "qwen3", "-n", "0"], 1, ["-n 0", "1 to 127"]),
        (["--shape", "tiny", "--trace", "qwen3"], 1, ["48 layers of 128", "6 layers of 16"]),
        (["--shape", "tiny", "-n", "50000"], 1, ["tg50000", "40,960"]),
        (["--shape", "tiny", "--pool", "3slots"], 1, ["--pool 3slots", "4slots"]),
    ],
)
def test_shapes_and_traces_that_do_not_fit(
    argv: list[str], code: int, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *CPU, *argv]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert all(name in err for name in names), err
    assert len(err.splitlines()) <= 2


def test_a_shape_that_does_not_fit_the_machine_is_refused_with_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    needed = find_shape("mixtral-8x7b").config.num_routed_experts * 352_325_632
    if available_host_bytes() > needed:
        pytest.skip("this machine has room for it")
    assert main(["bench", "--shape", "mixtral-8x7b", *CPU]) == 1
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 2
    assert "mixtral-8x7b" in err and "84.00 GiB" in err and "available" in err


def test_the_policy_decides_who_leaves(rows: Callable[..., list[dict[str, Any]]]) -> None:
    """The same tokens, other misses; the rows say which."""
    misses = {}
    for policy in ("lru", "decayed"):
        found = rows("-p", "0", "-n", "40", "-r", "1", "--pool", "8slots", "--policy", policy)
        assert {row["policy"] for row in found} == {policy}
        misses[policy] = [row["misses_per_token"] for row in found]
    assert misses["lru"] != misses["decayed"]
