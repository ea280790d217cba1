"""`make soak`: random conversations for minutes on end, on a GPU in the graph engine.

Every move is checked (`conversations.py`), and what the process holds is measured after a warm-up
and at the end. Writes <out>/<date>-<gpu>-<commit>-soak.json; exits 1 on any violation or leak. Runs
with any python that has torch and the packages of pyproject.toml.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "weights")]

from seqmoe_cli.environment import prepare_torch  # noqa: E402

prepare_torch()

import torch  # noqa: E402

from benchmarks.agreement import (  # noqa: E402
    COMPARED_TOKENS,
    FIRST_WRONG_ROWS,
    NEAR_TIE,
    WRONG_ROWS,
    Violation,
    WatchedEngine,
)
from benchmarks.conversations import Conversations  # noqa: E402
from seqmoe_cli.bench.machine import machine_facts  # noqa: E402
from seqmoe_cli.engine.decoding import EagerSteps  # noqa: E402
from seqmoe_cli.engine.engine import Engine  # noqa: E402
from seqmoe_cli.settings import EngineOptions, PoolSize  # noqa: E402
from seqmoe_kernels.state import HITS, MISSES, PREFETCHES  # noqa: E402

WARM_UP = 0.2  # share of the time; what is allocated once is there afterwards


class Usage(NamedTuple):
    """What the process holds."""

    rss_mib: float
    cuda_allocated_mib: float
    cuda_reserved_mib: float
    open_files: int
    threads: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        status = Path("/proc/self/status").read_text()
        rss, threads = (
            int(re.search(rf"^{key}:\s+(\d+)", status, re.MULTILINE)[1])
            for key in ("VmRSS", "Threads")
        )
        on_gpu = torch.cuda.is_available()
        return cls(
            round(rss / 1024, 1),
            round(torch.cuda.memory_allocated() / 2**20, 1) if on_gpu else 0.0,
            round(torch.cuda.memory_reserved() / 2**20, 1) if on_gpu else 0.0,
            len(os.listdir("/proc/self/fd")),
            threads,
        )


MOST_GROWTH = Usage(128.0, 1.0, 256.0, 2, 2)  # from the warm-up to the end


def leaks(before: Usage, after: Usage) -> list[str]:
    """What grew beyond `MOST_GROWTH`, one line each."""
    return [
        f"{name} grew from {then} to {now}, more than {most} is a leak"
        for name, then, now, most in zip(Usage._fields, before, after, MOST_GROWTH, strict=True)
        if now - then > most
    ]


def open_engines(model: Path, options: EngineOptions) -> tuple[WatchedEngine, Engine]:
    """The engine to be tested, and one with all experts resident that decodes operation by
    operation. On a CPU, which has no graph, the first runs a step ahead of the host as a graph
    does. Prefetch stays on, so that there is one graph for all steps."""
    engine = WatchedEngine.open(model, options)
    engine.hold()
    if isinstance(engine.decoding.issue, EagerSteps):
        engine.decoding.issue.ahead = 1
    plain = EngineOptions(PoolSize("all"), options.device, options.dtype, options.ctx_size)
    return engine, Engine.open(model, plain, eager=True)


def soak(
    talk: Conversations, going: Callable[[], float], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Move until `going`, the share of the work that is done, reaches 1. What came of it; `ok` is
    false after a violation, a failure or a leak."""
    started = told = time.monotonic()
    samples: list[dict[str, Any]] = []
    before: Usage | None = None
    faults: list[str] = []

    def sample() -> Usage:
        usage = Usage.now()
        minutes = round((time.monotonic() - started) / 60, 1)
        samples.append({"minutes": minutes, "moves": talk.num_moves, **usage._asdict()})
        tell(json.dumps(samples[-1]))
        return usage

    try:
        talk.touch_everything()
        while (share := going()) < 1:
            talk.move()
            if before is None and share >= WARM_UP:
                before = sample()
            if time.monotonic() - told > 60:
                told = time.monotonic()
                sample()
    except Exception as error:
        traceback.print_exc()
        kind = "" if isinstance(error, Violation) else f"{type(error).__name__}: "
        faults.append(f"move {talk.num_moves}: {kind}{error}")
    after = sample()
    faults += leaks(before or after, after)
    pool = talk.engine.pool.state.counters.tolist()
    return {
        "ok": not faults,
        "faults": faults,
        "minutes": round((time.monotonic() - started) / 60, 2),
        "moves": talk.num_moves,
        "counts": dict(sorted(talk.counts.items())),
        "evaluated_tokens": talk.engine.evaluated,
        "hits": pool[HITS],
        "misses": pool[MISSES],
        "prefetches": pool[PREFETCHES],
        "near_ties": talk.comparison.near_ties,
        "most_wrong_rows": talk.comparison.most_wrong_rows,
        "after_warm_up": before and before._asdict(),
        "at_the_end": after._asdict(),
        "samples": samples,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", type=Path, default=ROOT / ".demo/smollm2-sparse")
    parser.add_argument("--pool", default="25%", help="of the tested engine")
    parser.add_argument("--policy", default="lru", choices=("lru", "decayed"))
    parser.add_argument("--prefetch", default="off", choices=("off", "lookahead"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ctx-size", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verify", action="store_true", help="verify every slot as well")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/gpu")
    args = parser.parse_args()
    options = EngineOptions(
        PoolSize.parse(args.pool),
        args.device,
        "float32",
        args.ctx_size,
        verify=args.verify,
        policy=args.policy,
        prefetch=args.prefetch,
    )
    engine, reference = open_engines(args.model, options)
    talk = Conversations(args.model, engine, reference, args.seed)
    machine = machine_facts(engine.device.type)
    commit = machine.pop("build_commit")
    started = time.monotonic()
    result = soak(
        talk,
        lambda: (time.monotonic() - started) / 60 / args.minutes,
        lambda line: print(line, flush=True),
    )
    bounds = {
        "growth": MOST_GROWTH._asdict(),
        "near_tie": NEAR_TIE,
        "wrong_rows": WRONG_ROWS,
        "first_wrong_rows": FIRST_WRONG_ROWS,
    }
    record = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "command": " ".join(("benchmarks/soak.py", *sys.argv[1:])),
        "python": sys.version.split()[0],
        **machine,
        "model": args.model.name,
        "decoding": type(engine.decoding.issue).__name__,
        "num_slots": engine.plan.num_slots,
        "ctx_size": engine.ctx_size,
        "verify": args.verify,
        "policy": args.policy,
        "prefetch": engine.plan.prefetch,
        "prefetch_by": engine.plan.prefetch_by if engine.prefetch else "",
        "compared_tokens": COMPARED_TOKENS,
        "bounds": bounds,
        **result,
    }
    gpu = re.sub(r"[^a-z0-9]+", "-", machine["gpu_info"].lower()).strip("-") or "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{record['date']}-{gpu}-{commit[:9]}-soak.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {path}: {'ok' if result['ok'] else result['faults']}")
    reference.close()
    engine.close()
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
