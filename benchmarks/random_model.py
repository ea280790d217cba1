"""A full-size model of random weights: its rows in `seqmoe bench`, whether it says the same in
every way to decode it, and where the time of a step goes.

`python benchmarks/random_model.py --pool 45% --trace qwen3` prints the last of these, kernel by
kernel; the rows are those of `seqmoe bench --shape`.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "weights")]

import torch

from benchmarks import kernels, step_profile
from seqmoe_cli.bench.matrix import make_cases
from seqmoe_cli.bench.recorded import RecordedRouting
from seqmoe_cli.bench.session import Session
from seqmoe_cli.bench.shapes import SHAPES
from seqmoe_cli.bench.source import Loaded, Source, opened, random_source
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.memory import MemoryPlan, plan_memory
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams

SHAPE, TRACE, REPETITIONS = "qwen3-30b-a3b-fp8", "qwen3", 3
POOLS = ("all", "45%", "25%", "15%")
WAYS = (("all", "graph"), ("25%", "graph"), ("45%", "eager"))
PROMPT_TOKENS, TEXT_TOKENS, CTX_SIZE = 64, 64, 1024
DEPTH = 4096  # of the row behind a long context, and of the profile of such a step


def bench(shape: str = SHAPE, device: str = "cuda") -> dict[str, Any]:
    """The rows of the two commands that the result names, over weights that are made once, and
    the comparison of texts."""
    source, routing = random_source(shape), RecordedRouting.open(TRACE)
    plain_cases = make_cases((512,), (128,), (0,))
    plain = Session.prepare(source, plain_cases, _options(("all",), device), REPETITIONS)
    replayed = Session.prepare(
        source, routing.cases(None, (0,)), _options(POOLS, device), REPETITIONS, routing=routing
    )
    deep_cases = make_cases((), (128,), (DEPTH,))
    deep = Session.prepare(source, deep_cases, _options(("all",), device), REPETITIONS)

    def fill(engine: Engine) -> None:
        fill_context(engine, source.ids[:DEPTH])

    rows = []
    with source.loaded(plain.setups[0].plan) as loaded:
        for session in (plain, replayed, deep):
            prepare = fill if session is deep else None
            for row in session.rows(loaded, lambda text: None, prepare):
                rows.append(row)
                print(_summary(rows[-1]), flush=True)
        texts = compare_texts(source, loaded, device)
        deep_step = profile_deep(source, loaded, device) if device == "cuda" else None
    command = (
        f"seqmoe bench --shape {shape} -r {REPETITIONS} --policy lru --prefetch off -o json --pool"
    )
    return {
        "weights": "random",
        "commands": [
            f"{command} all",
            f"{command} {','.join(POOLS)} --trace {TRACE}",
            f"{command} all -p 0 -d {DEPTH}, the context filled at random",
        ],
        "rows": rows,
        "texts": texts,
        "step_behind_4096": deep_step,
    }


def fill_context(engine: Engine, ids: Sequence[int]) -> None:
    """Let the KV state hold `ids`, with random keys and values: no time depends
    on what they are, and evaluating them takes long."""
    engine.kv.keys.normal_()
    engine.kv.values.normal_()
    engine.kv.commit(ids)


def profile_deep(source: Source, loaded: Loaded, device: str) -> dict[str, Any]:
    """Where the time of a step behind DEPTH tokens goes, kernel by kernel, and the attention's
    share of it: its calls in a graph of their own, against the step. (A kernel's time inside the
    step includes its wait for the one before, which it overlaps.)"""
    options = EngineOptions(PoolSize.parse("all"), device, ctx_size=DEPTH + 512)
    plan = plan_memory(source, options)
    with opened(source, loaded, plan) as engine:
        fill_context(engine, source.ids[:DEPTH])
        engine.warm(range(engine.config.num_routed_experts))
        step = step_profile.report(engine, list(source.ids[: DEPTH + 1]))
        num_layers = source.config.num_hidden_layers
    attention = kernels.attention_us(DEPTH, num_layers)
    step["attention_ms"] = attention * num_layers / 1e3
    step["attention_share"] = step["attention_ms"] / step["step_ms"]
    print(f"attention {step['attention_ms']:.3f} ms, {100 * step['attention_share']:.1f} % of it")
    return step


def _options(pools: tuple[str, ...], device: str) -> list[EngineOptions]:
    """Without prefetch: what the pool alone does."""
    plain = EngineOptions(device=device, ctx_size=CTX_SIZE, policy="lru", prefetch="off")
    return [replace(plain, pool=PoolSize.parse(pool)) for pool in pools]


def _summary(row: dict[str, Any]) -> str:
    parts = [f"{row['pool']:>5} {row['test']:8} {row['state']:5} {row['trace'] or 'router':8}"]
    parts.append(f"{row['avg_ts']:9.2f} ± {row['stddev_ts']:.2f} tok/s")
    for name in ("misses_per_token", "compute_ms", "stall_ms", "gap_ms", "share_of_copy"):
        parts.append(f"{name} {row[name]:.3f}" if row[name] is not None else "")
    return "  ".join(parts)


def compare_texts(source: Source, loaded: Loaded, device: str) -> dict[str, Any]:
    """The tokens of one answer in all `WAYS`, and the most device memory that they took. Raises
    `AssertionError` when the tokens depend on the pool size or on the graph."""
    texts, memory = [], {}
    for pool, way in WAYS:
        plan = plan_memory(source, _options((pool,), device)[0])
        if device == "cuda":
            gc.collect()  # the engine before this one, whose parts refer to each other
            torch.cuda.reset_peak_memory_stats()
        with opened(source, loaded, plan, eager=way == "eager") as engine:
            steps = engine.generate(
                source.ids[:PROMPT_TOKENS], SamplingParams(seed=0), max_tokens=TEXT_TOKENS
            )
            texts.append([step.token_id for step in steps])
        del engine, steps
        if device == "cuda":
            memory[f"{pool} {way}"] = {
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                "planned_gib": planned_bytes(plan) / 2**30,
            }
    if any(text != texts[0] for text in texts):
        raise AssertionError("the text depends on the pool size or on the graph")
    return {"same": [" ".join(way) for way in WAYS], "tokens": TEXT_TOKENS, "device_memory": memory}


def planned_bytes(plan: MemoryPlan) -> int:
    """All device memory of a plan."""
    return plan.resident_bytes + plan.kv_bytes + plan.workspace_bytes + plan.pool_bytes


def profile(source: Source, pool: str, routing: RecordedRouting | None, eager: bool) -> None:
    """Print where the time of a step goes, kernel by kernel."""
    if routing is not None:
        routing.check_fits(source.name, source.config)
        source = source.with_top_k(routing.trace.top_k)
    plan = plan_memory(source, _options((pool,), "cuda")[0])
    with source.loaded(plan) as loaded, opened(source, loaded, plan, eager=eager) as engine:
        if routing is not None:
            engine.replay(routing.replayed(engine.device))
        step_profile.report(engine, list(source.ids[:PROMPT_TOKENS]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default=SHAPE)
    parser.add_argument("--pool", default="all")
    parser.add_argument("--trace", help="replay this routing")
    parser.add_argument("--eager", action="store_true", help="without a CUDA graph")
    args = parser.parse_args()
    routing = RecordedRouting.open(args.trace) if args.trace else None
    profile(random_source(args.shape), args.pool, routing, args.eager)


if __name__ == "__main__":
    main()
