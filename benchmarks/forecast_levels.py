"""Each policy and each kind of prefetch beside the one below it: a full-size model of random
weights that replays recorded routing, and a packed model with its own routers and predictor.

`python benchmarks/forecast_levels.py [MODEL] [--predictor FILE]` prints a row for each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "weights")]

from seqmoe_cli.bench.matrix import Case, make_cases
from seqmoe_cli.bench.recorded import RecordedRouting
from seqmoe_cli.bench.session import Session
from seqmoe_cli.bench.source import Source, packed_source, random_source
from seqmoe_cli.bench.text import shipped_text
from seqmoe_cli.settings import EngineOptions, PoolSize
from seqmoe_weights.packed import PackedModel

SHAPE, TRACE, REPETITIONS = "qwen3-30b-a3b-fp8", "qwen3", 3
POOLS = ("45%", "25%")
LEVELS = (
    *(("lru", "off"), ("lru", "lookahead")),
    *(("decayed", "off"), ("decayed", "lookahead"), ("decayed", "full")),
)
FORECAST = (("forecast", "off"), ("forecast", "lookahead"), ("forecast", "full"))
NUM_GEN = 256  # tokens that a packed model generates
KEPT = (
    *("trace", "pool", "policy", "prefetch", "predictor", "look_ahead", "state", "test", "avg_ts"),
    *("stddev_ts", "share_of_full_load", "ms_per_token", "compute_ms", "stall_ms", "gap_ms"),
    *("hit_rate", "misses_per_token", "prefetches_per_token", "prefetch_hits_per_token"),
    *("prefetches_late_per_token", "prefetches_dropped_per_token", "prefetch_rested"),
    *("look_ahead_recall", "look_ahead_precision", "kernels_per_token", "fallbacks"),
)


def bench(model: Path | None = None, predictor: Path | None = None) -> dict[str, Any]:
    """Rows of both; of the second only with a packed `model`. With `predictor`, a file for TRACE,
    also what lives on forecasts there."""
    source, routing = random_source(SHAPE), RecordedRouting.open(TRACE)
    levels = LEVELS if predictor is None else (*LEVELS, *FORECAST)
    rows = list(_rows(source, routing.cases(None, (0,)), levels, predictor, routing))
    if model is not None:
        packed = packed_source(model, *shipped_text())
        has_own = PackedModel.open(model).predictor is not None
        levels = (*LEVELS[:-1], *((LEVELS[-1], *FORECAST) if has_own else ()))
        rows += _rows(packed, make_cases((), (NUM_GEN,), (0,)), levels)
    return {"shape": SHAPE, "trace": TRACE, "repetitions": REPETITIONS, "rows": rows}


def _rows(
    source: Source,
    cases: Sequence[Case],
    levels: Sequence[tuple[str, str]],
    predictor: Path | None = None,
    routing: RecordedRouting | None = None,
) -> Iterator[dict[str, Any]]:
    options = [EngineOptions(PoolSize.parse("all"))]
    for pool in POOLS:
        for policy, prefetch in levels:
            given = predictor if policy == "forecast" else None  # else full is simulated
            size = PoolSize.parse(pool)
            options.append(EngineOptions(size, policy=policy, prefetch=prefetch, predictor=given))
    sessions = [
        Session.prepare(source, cases, part, REPETITIONS, routing=routing)
        for part in _by_predictor(options)
        if part
    ]
    lru: dict[str, float] = {}  # by pool: bytes over the link per token
    full_ts = 0.0
    with source.loaded(sessions[0].setups[0].plan) as loaded:
        for session in sessions:
            for row in session.rows(loaded, lambda text: None):
                values = row.to_dict()
                full_ts = full_ts or row.avg_ts
                moved = (row.bytes_fetched + row.bytes_prefetched) / row.n_gen
                lru.setdefault(str(values["pool"]), moved)
                kept = {name: values[name] for name in KEPT}
                kept["share_of_full_load"] = row.avg_ts / full_ts
                kept["bytes_per_token"] = moved
                base = lru[str(values["pool"])]
                kept["bytes_of_lru"] = moved / base if base else None
                print(_summary(kept), flush=True)
                yield kept


def _by_predictor(options: Sequence[EngineOptions]) -> tuple[list[EngineOptions], ...]:
    """Those without a file and those with one: a session has one predictor at the most."""
    return [o for o in options if o.predictor is None], [o for o in options if o.predictor]


def _summary(row: dict[str, Any]) -> str:
    parts = [f"{row['pool']:>4} {row['policy']:8} {row['prefetch']:9} {row['state']:4}"]
    parts.append(f"{row['avg_ts']:7.1f} tok/s, {row['share_of_full_load']:.1%} of full load")
    for name in ("hit_rate", "misses_per_token", "compute_ms", "stall_ms", "bytes_of_lru"):
        parts.append(f"{name} {row[name]:.3f}" if row[name] is not None else "")
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="a packed model")
    parser.add_argument("--predictor", type=Path, help="trained for the routing that is replayed")
    args = parser.parse_args()
    print(json.dumps(bench(args.model, args.predictor), indent=2))


if __name__ == "__main__":
    main()
