"""Each policy and each kind of prefetch beside the one below it: a full-size model of random
weights that replays recorded routing, and a packed model with its own routers and predictor.

`python benchmarks/forecast_levels.py [MODEL] [--replay TRACE,PREDICTOR,TOKENS,TIMED ...]` prints a
row for each as they come, what matters most first, and in the end all of them as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "weights")]

from seqmoe_cli.bench.matrix import make_cases
from seqmoe_cli.bench.recorded import RecordedRouting
from seqmoe_cli.bench.session import Session
from seqmoe_cli.bench.source import Loaded, packed_source, random_source
from seqmoe_cli.settings import EngineOptions, PoolSize
from seqmoe_cli.text.files import shipped_text
from seqmoe_weights.packed import PackedModel

SHAPE, TRACE = "qwen3-30b-a3b-fp8", "qwen3"
POOLS = "45%,25%"
Levels = tuple[tuple[str, str], ...]
Options = list[EngineOptions]
PLAIN: Levels = (("lru", "off"), ("decayed", "off"))
FORECAST: Levels = (("forecast", "off"), ("forecast", "lookahead"), ("forecast", "full"))
ON_COUNTS: Levels = (("decayed", "lookahead"), ("decayed", "full"))
AHEAD: Levels = (("lru", "lookahead"),)
FULL: Levels = FORECAST[-1:]
TRUE_NAMES = ((1.0, 1.0),) * 4
NUM_GEN = 256  # tokens that a packed model generates
REPETITIONS, LONG = 2, 256  # a trace of more tokens than that is replayed once
KEPT = (
    *("trace", "pool", "policy", "prefetch", "prefetch_by", "predictor", "look_ahead", "state"),
    *("test", "avg_ts", "stddev_ts", "ms_per_token", "compute_ms", "stall_ms", "gap_ms"),
    *("hit_rate", "misses_per_token", "prefetches_per_token", "prefetch_hits_per_token"),
    *("prefetches_late_per_token", "prefetches_dropped_per_token", "prefetch_saved"),
    *("prefetch_pays", "eviction_saved_misses", "look_ahead_recall", "look_ahead_precision"),
    *("kernels_per_token", "n_untimed", "fallbacks"),
)


@dataclass(frozen=True)
class Replay:
    """The first `tokens` of a trace, the last `timed` of them timed, which the predictor in a file
    has not learned from."""

    trace: str
    predictor: Path
    tokens: int
    timed: int

    def __str__(self) -> str:
        return f"--replay {self.trace},{self.predictor},{self.tokens},{self.timed}"

    @classmethod
    def parse(cls, text: str) -> Replay:
        """`TRACE,PREDICTOR,TOKENS,TIMED`; raises `ArgumentTypeError` for anything else."""
        try:
            trace, predictor, tokens, timed = text.split(",")
            return cls(trace, Path(predictor), int(tokens), int(timed))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not TRACE,PREDICTOR,TOKENS,TIMED"
            ) from None


@dataclass(frozen=True)
class Part:
    """Rows of one session. Those of the same `name` have a full load and, by pool, bytes over the
    link of `lru` without prefetch in common, whose rows come first."""

    name: str
    session: Session
    variant: str = ""  # what is not as the program has it


def bench(
    model: Path | None = None,
    replays: tuple[Replay, ...] = (),
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
    pools: str = POOLS,
    shape: str = SHAPE,
    device: str = "cuda",
) -> dict[str, Any]:
    """Rows of the replays and of TRACE with everything simulated, and with a packed `model` its
    own. `keep` gets all that is there after each row."""
    rows: list[dict[str, Any]] = []
    command = f"benchmarks/gpu_check.py --only forecast --pools {pools}"
    command = " ".join((command, *map(str, replays)))
    found = {"command": command, "shape": shape, "trace": TRACE, "rows": rows}
    parts = list(Planned(shape, device, pools.split(",")).parts(model, replays))  # all are checked
    for row in _rows(parts):
        rows.append(row)
        print(_summary(row), flush=True)
        keep(found)
    return found


@dataclass(frozen=True)
class Planned:
    """All rows, what matters most first: everything at a pool comes before anything at the next."""

    shape: str
    device: str
    pools: list[str]

    def parts(self, model: Path | None, replays: tuple[Replay, ...]) -> Iterator[Part]:
        for pool in self.pools:
            for given in replays:
                yield from self._replayed(given, pool)
            yield from self._simulated(pool)
            if model is not None:
                yield from self._own(model, pool)

    def _replayed(self, given: Replay, pool: str) -> Iterator[Part]:
        routing = RecordedRouting.open(given.trace).first(given.tokens)
        name, timed = f"{given.trace}, {given.predictor}", given.timed
        levels = self._options(pool, (*PLAIN, *FORECAST), given.predictor)
        yield from self._of_trace(name, routing, timed, pool, levels)
        by_thread = self._options(pool, FULL, given.predictor, "thread")
        yield Part(name, self._session(routing, timed, by_thread), "by a thread")

    def _simulated(self, pool: str) -> Iterator[Part]:
        routing = RecordedRouting.open(TRACE)
        name, timed = f"{TRACE}, simulated", len(routing.trace) // 2
        levels = self._options(pool, (*PLAIN, *AHEAD, *ON_COUNTS))
        yield from self._of_trace(name, routing, timed, pool, levels)
        by_thread = self._options(pool, ON_COUNTS, prefetch_by="thread")
        yield Part(name, self._session(routing, timed, by_thread), "by a thread")
        true = replace(routing, accuracy=TRUE_NAMES)
        session = self._session(true, timed, self._options(pool, AHEAD))
        yield Part(name, session, "true names")

    def _own(self, model: Path, pool: str) -> Iterator[Part]:
        source, cases = packed_source(model, *shipped_text()), make_cases((), (NUM_GEN,), (0,))
        has_predictor = PackedModel.open(model).predictor is not None
        levels = (*PLAIN, *ON_COUNTS, *FORECAST) if has_predictor else (*PLAIN, ON_COUNTS[0])
        options = [*self._full_load(pool), *self._options(pool, levels)]
        yield Part(source.name, Session.prepare(source, cases, options, REPETITIONS))

    def _of_trace(
        self, name: str, routing: RecordedRouting, timed: int, pool: str, levels: Options
    ) -> Iterator[Part]:
        """Kernels are compiled and a graph is captured in the steps before those that are timed;
        only a pool of all experts wants a warm-up."""
        if full := self._full_load(pool):
            yield Part(name, self._session(routing, timed, full, warmup=True))
        yield Part(name, self._session(routing, timed, levels))

    def _full_load(self, pool: str) -> Options:
        """Compared with at every pool, and run at the first one."""
        return self._options("all", PLAIN[:1]) if pool == self.pools[0] else []

    def _options(
        self, pool: str, levels: Levels, predictor: Path | None = None, prefetch_by: str = "auto"
    ) -> Options:
        return [
            EngineOptions(
                PoolSize.parse(pool),
                self.device,
                policy=policy,
                prefetch=kind,
                prefetch_by=prefetch_by,
                predictor=predictor,
            )
            for policy, kind in levels
        ]

    def _session(
        self, routing: RecordedRouting, timed: int, options: Options, warmup: bool = False
    ) -> Session:
        cases = routing.cases((timed,), (0,))
        repetitions = REPETITIONS if len(routing.trace) <= LONG else 1
        source = random_source(self.shape)
        return Session.prepare(source, cases, options, repetitions, warmup, routing)


def _rows(parts: list[Part]) -> Iterator[dict[str, Any]]:
    """Weights are loaded once for all parts that want them."""
    loaded: dict[str, Loaded] = {}
    full_ts: dict[str, float] = {}
    lru: dict[tuple[str, str], float] = {}
    with ExitStack() as stack:
        for part in parts:
            session, source = part.session, part.session.source
            if source.name not in loaded:
                context = source.loaded(session.setups[0].plan)
                loaded[source.name] = stack.enter_context(context)
            for row in session.rows(loaded[source.name], lambda text: None):
                moved = (row["bytes_fetched"] + row["bytes_prefetched"]) / row["n_gen"]
                if row["pool"] == "all":
                    full_ts[part.name] = row["avg_ts"]  # the warm row is the last one
                base = lru.setdefault((part.name, row["pool"]), moved)
                yield {
                    "part": part.name,
                    "variant": part.variant,
                    **{name: row[name] for name in KEPT},
                    "share_of_full_load": row["avg_ts"] / full_ts[part.name],
                    "bytes_per_token": moved,
                    "bytes_of_lru": moved / base if base else None,
                }


def _summary(row: dict[str, Any]) -> str:
    way = " ".join(filter(None, (row["pool"], row["policy"], row["prefetch"], row["variant"])))
    parts = [f"{row['part']}: {way}, {row['state']}"]
    parts.append(f"{row['avg_ts']:7.1f} tok/s, {row['share_of_full_load']:.1%} of full load")
    for name in ("hit_rate", "misses_per_token", "compute_ms", "stall_ms", "bytes_of_lru"):
        parts.append(f"{name} {row[name]:.3f}" if row[name] is not None else "")
    return "  ".join(parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replay", type=Replay.parse, action="append", default=[],
        metavar="TRACE,PREDICTOR,TOKENS,TIMED",
        help="the first TOKENS of a trace, the last TIMED of them timed, with a predictor that has "
        "not learned from these; may be given several times",
    )  # fmt: skip
    parser.add_argument("--pools", default=POOLS, help="of part forecast, first things first")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="a packed model")
    parser.add_argument("--shape", default=SHAPE, help="of the random weights")
    parser.add_argument("--device", default="cuda")
    add_arguments(parser)
    args = parser.parse_args()
    found = bench(
        args.model, tuple(args.replay), pools=args.pools, shape=args.shape, device=args.device
    )
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
