"""The rows of the forecast's benchmark, on a tiny shape: each level is there, what matters most
comes first, and what is there is kept after every row."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks import forecast_levels
from benchmarks.forecast_levels import Replay, bench
from seqmoe_cli.forecast.trace import Trace
from seqmoe_cli.main import main
from tests.checkpoints import packed_model

CPU = ["--device", "cpu", "--dtype", "float32"]
LEVELS = ["lru off", "decayed off", "forecast off", "forecast lookahead", "forecast full"]


def test_every_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"num_hidden_layers": 6, "num_experts": 16, "num_experts_per_tok": 3}
    model = packed_model(tmp_path, "qwen3_moe", **shape)
    prompts, trace, predictor = (tmp_path / name for name in ("prompts", "trace", "predictor"))
    prompts.write_text('["Hello", "And then?", "Why"]')
    argv = ["trace", str(model), *CPU, "--prompts", str(prompts), "-n", "14", "-o", str(trace)]
    assert main(argv) == 0
    argv = ["train", "--trace", str(trace), "--passes", "1", "--width", "16", "--device", "cpu"]
    assert main([*argv, "-o", str(predictor)]) == 0
    monkeypatch.setattr(forecast_levels, "TRACE", str(trace))
    monkeypatch.setattr(forecast_levels, "NUM_GEN", 5)

    kept: list[int] = []

    def keep(found: dict[str, Any]) -> None:
        kept.append(len(found["rows"]))

    replay = Replay.parse(f"{trace},{predictor},20,7")
    found = bench(model, (replay,), keep, "45%,25%", "tiny", "cpu")
    rows = found["rows"]
    assert found["command"].endswith(f" --replay {trace},{predictor},20,7")
    assert kept == [*range(1, len(rows) + 1)]
    own, simulated, replayed = "packed", f"{trace}, simulated", f"{trace}, {predictor}"
    assert [*dict.fromkeys(row["part"] for row in rows)] == [replayed, simulated, own]
    pools = [row["pool"] for row in rows]
    assert pools.index("25%") > max(i for i, pool in enumerate(pools) if pool in ("all", "45%"))
    for pool in ("45%", "25%"):
        of_pool = [row for row in rows if row["pool"] == pool]
        ways = {
            part: [_way(r) for r in of_pool if r["part"] == part]
            for part in (replayed, simulated, own)
        }
        assert ways[replayed] == [*LEVELS, "forecast full"]
        assert ways[simulated][-1] == "lru lookahead" and len(ways[simulated]) == 8
        assert [*dict.fromkeys(ways[own])] == ["lru off", "decayed off", "decayed lookahead"]
        (first, *_), *_ = ([r for r in of_pool if r["part"] == part] for part in ways)
        assert first["bytes_of_lru"] == 1.0
        blurred, true = (r for r in of_pool if r["part"] == simulated and "lru look" in _way(r))
        assert (blurred["variant"], true["variant"]) == ("", "true names")
        assert min(true["look_ahead_precision"]) > max(blurred["look_ahead_precision"])
    untimed = Trace.load(trace).phase.sum()
    assert {row["n_untimed"] for row in rows if row["part"] == replayed} == {13}
    assert {row["n_untimed"] for row in rows if row["part"] == simulated} == {
        untimed - untimed // 2
    }


def _way(row: dict[str, Any]) -> str:
    return f"{row['policy']} {row['prefetch']}"


@pytest.mark.parametrize("text", ["a,b", "a,b,1,x", ""])
def test_a_replay_is_four_things(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="TRACE,PREDICTOR,TOKENS,TIMED"):
        Replay.parse(text)
