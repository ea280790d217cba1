"""seqmoe bench with a predictor: each policy and kind of prefetch beside the one below it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seqmoe_cli.forecast.trace import DECODE, Trace
from seqmoe_cli.main import main
from seqmoe_cli.residency.switch import Switch
from tests.checkpoints import packed_model

CPU = ["--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A predictor for the layers and experts of `tiny`, and the part of a trace that it has not
    learned from."""
    folder = tmp_path_factory.mktemp("forecast")
    shape = {"num_hidden_layers": 6, "num_experts": 16, "num_experts_per_tok": 3}
    model = packed_model(folder, "qwen3_moe", **shape)
    names = ("prompts", "trace", "held", "predictor")
    files = {"model": model} | {name: folder / name for name in names}
    files["prompts"].write_text('["Hello", "And then?", "Why"]')
    argv = ["trace", str(model), *CPU, "--prompts", str(files["prompts"]), "-n", "14"]
    assert main([*argv, "-o", str(files["trace"])]) == 0
    argv = ["train", "--trace", str(files["trace"]), "--passes", "1", "--width", "16"]
    argv += ["--device", "cpu", "--held-out", str(files["held"]), "-o", str(files["predictor"])]
    assert main(argv) == 0
    return files


def test_every_way_beside_the_others(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "--shape", "tiny", *CPU, "--trace", str(files["held"]), "-r", "1"]
    argv += ["--policy", "lru,forecast", "--prefetch", "off,full", "--pool", "45%,all"]
    capsys.readouterr()
    assert main([*argv, "--predictor", str(files["predictor"]), "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ways = [(row["pool"], row["policy"], row["prefetch"]) for row in found]
    assert ways == [
        ("all", "lru", "off"),
        ("45%", "lru", "off"),
        ("45%", "forecast", "off"),
        ("45%", "forecast", "full"),
    ]
    trace = Trace.load(files["trace"])
    learned = (trace.phase == DECODE).size - len(Trace.load(files["held"]))
    note = f"{files['predictor']}, learned from {learned:,} tokens of {files['trace']}"
    assert [row["predictor"] for row in found] == ["", "", note, note]
    assert found[3]["bytes_prefetched"] > 0 == found[2]["bytes_prefetched"]
    saved = [row["eviction_saved_misses"] for row in found]
    assert saved[:2] == [None, None] and all(abs(number) < 18 for number in saved[2:])
    assert main([*argv, "--predictor", str(files["predictor"])]) == 0
    out = capsys.readouterr().out
    assert "45% forecast full" in out and f"predictor: {note}" in out
    table = out.splitlines()[:6]  # head, rule, the four rows
    assert len({tuple(i for i, c in enumerate(line) if c == "|") for line in table}) == 1


def test_prefetch_stays_on_whatever_the_switch_would_say(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would say is worked out from the row without prefetch, if there is one before."""
    monkeypatch.setattr(Switch, "_go_on", lambda switch: switch._turn(False, 1))
    argv = ["bench", "--shape", "tiny", *CPU, "--trace", str(files["held"]), "-r", "2"]
    argv += ["--policy", "lru", "--pool", "45%", "-o", "json", "--prefetch"]
    capsys.readouterr()
    assert main([*argv, "off,lookahead"]) == main([*argv, "lookahead"]) == 0
    decoder, text = json.JSONDecoder(), capsys.readouterr().out
    (plain, held), end = decoder.raw_decode(text)
    (alone,) = json.loads(text[end:])
    assert min(row["bytes_prefetched"] for row in (held, alone)) > 0
    plain_ms, held_ms = (row["compute_ms"] + row["stall_ms"] for row in (plain, held))
    assert held["prefetch_saved"] == pytest.approx(1 - held_ms / plain_ms)
    assert isinstance(held["prefetch_pays"], bool)
    assert plain["prefetch_saved"] is alone["prefetch_saved"] is alone["prefetch_pays"] is None


@pytest.mark.parametrize(
    ("argv", "code", "names"),
    [
        (["--policy", "forecast"], 2, ["--policy forecast needs a predictor", "--predictor FILE"]),
        (["--policy", "lru", "--prefetch", "full"], 2, ["--prefetch full", "add --policy decayed"]),
        (
            ["--predictor", "p", "--policy", "lru,decayed"],
            1,
            ["--predictor p", "--policy forecast"],
        ),
        (
            ["--pool", "all", "--policy", "forecast", "--predictor", "p"],
            1,
            ["less than all"],
        ),
        (["--policy", "lru, fifo"], 2, ["--policy 'fifo'", "use auto, lru, decayed or forecast"]),
        (["--policy", "forecast", "--predictor", "nowhere"], 1, ["cannot read nowhere"]),
    ],
)
def test_what_is_refused(
    argv: list[str], code: int, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--shape", "tiny", "--pool", "45%", *CPU, *argv]) == code
    out, err = capsys.readouterr()
    assert not out and all(name in err for name in names) and len(err.splitlines()) <= 2


def test_a_trace_without_what_the_predictor_wants(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Trace.load(files["held"])
    bare = Trace("x", "none", 16, trace.experts, trace.sequence, trace.phase)
    bare.save(tmp_path / "bare")
    argv = ["bench", "--shape", "tiny", *CPU, "--trace", str(tmp_path / "bare"), "--pool", "45%"]
    argv += ["--policy", "forecast", "--predictor", str(files["predictor"])]
    assert main(argv) == 1
    assert "has no token ids" in capsys.readouterr().err
