"""A full-size model of random weights, built straight into host memory, and how fast it decodes.

Shapes, records and kernels are those of Qwen3-30B-A3B-FP8; the weights mean nothing, so neither
does the text, and the routing follows the token alone: it has none of the locality of a trained
model, which makes it the worst case for a pool.

`python benchmarks/random_model.py --pool all` measures and prints one line of JSON a case;
`--profile` adds where the device's time goes in one step, kernel by kernel.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "weights")]

import numpy as np
import torch

from benchmarks import step_profile
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.memory import plan_memory
from seqmoe_cli.engine.stats import TurnStats
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_weights.config import ModelConfig
from seqmoe_weights.families import family_of, scale_spec
from seqmoe_weights.layout import RecordLayout
from seqmoe_weights.store import HostStore

QWEN3_30B_A3B_FP8 = ModelConfig(
    family="qwen3_moe",
    num_hidden_layers=48,
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151936,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    max_position_embeddings=40960,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    dense_format="FP8",
)
STD = 0.02  # of every weight matrix, as trained models have it
FP8_STD = 29.0  # of uniformly random e4m3 codes below 0x70 with random signs
CASES = (("all", "graph"), ("all", "eager"), ("45%", "graph"))
PROMPT, GENERATED, REPETITIONS, CTX_SIZE = 512, 128, 3, 4096


def output_std(config: ModelConfig) -> float:
    """Of the matrices that add to the residual stream: what all layers add together must not
    outweigh the token, or all tokens are routed alike."""
    return STD / (2 * config.num_hidden_layers) ** 0.5


@dataclass(frozen=True)
class RandomModel:
    """What the engine asks of a model, without a folder."""

    config: ModelConfig
    layout: RecordLayout

    name = "random weights"


def random_store(model: RandomModel, pin: bool) -> HostStore:
    """Records of finite random FP8 weights, every expert different; filled by all cores."""
    layout, count = model.layout, model.config.num_routed_experts
    store = HostStore.allocate(count, layout.record_bytes, pin=False)
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 0x70, 2 * layout.record_bytes, dtype=np.uint8)
    noise |= rng.integers(0, 2, len(noise), dtype=np.uint8) << 7
    records = store.records.numpy()

    def fill(expert: int) -> None:
        record = records[expert]
        at = 64 * (expert % (layout.record_bytes // 64))
        record[:] = noise[at : at + layout.record_bytes]
        for name, std in (("gate", STD), ("up", STD), ("down", output_std(model.config))):
            part = layout[f"{name}_scale"]
            scales = record[part.offset : part.offset + part.num_bytes].view(np.float32)
            scales[:] = std / FP8_STD
        stamp = layout["stamp"].offset
        record[stamp : stamp + 8].view(np.int64)[:] = expert

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(fill, range(count)))
    if pin:
        store.pin()
    return store


def random_weights(config: ModelConfig, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Resident tensors of the model, made on the device."""
    torch.manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for spec in family_of({"model_type": config.family}).resident_tensors(config):
        if spec.quantized:
            codes = torch.randint(0, 0x70, spec.shape, dtype=torch.uint8, device=device)
            codes |= torch.randint(0, 2, spec.shape, dtype=torch.uint8, device=device) << 7
            weights[spec.name] = codes.view(torch.float8_e4m3fn)
            scale = scale_spec(spec)
            std = output_std(config) if "o_proj" in spec.name else STD
            weights[scale.name] = torch.full(scale.shape, std / FP8_STD, device=device)
        elif len(spec.shape) == 1:
            weights[spec.name] = torch.ones(spec.shape, dtype=dtype, device=device)
        else:
            std = 1.0 if "embed_tokens" in spec.name else STD
            weights[spec.name] = (std * torch.randn(spec.shape, device=device)).to(dtype)
    return weights


def engines(
    model: RandomModel, cases: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str, Engine]]:
    """One engine per case (pool size, "graph" or "eager"), over one store."""
    started = time.perf_counter()
    store = random_store(model, pin=True)
    print(f"records made and pinned in {time.perf_counter() - started:.1f} s", flush=True)
    weights = random_weights(model.config, torch.bfloat16, "cuda")
    for pool, decode in cases:
        options = EngineOptions(PoolSize.parse(pool), "cuda", "bfloat16", ctx_size=CTX_SIZE)
        plan = plan_memory(model, options)
        torch.cuda.reset_peak_memory_stats()
        yield pool, decode, Engine(model, store, plan, weights, eager=decode == "eager")
        torch.cuda.synchronize()  # nothing may run when the engine goes


def bench(
    cases: Sequence[tuple[str, str]] = CASES, profile: bool = False, generated: int = GENERATED
) -> dict[str, Any]:
    """Prompt and decode speed of each case, warm, and whether all of them say the same."""
    layout = RecordLayout.for_experts(2048, 768, "F8_E4M3")
    model = RandomModel(QWEN3_30B_A3B_FP8, layout)
    rows, texts = [], []
    for pool, decode, engine in engines(model, cases):
        row, text = _measure(engine, generated)
        rows.append({"pool": pool, "decode": decode, "slots": engine.plan.num_slots, **row})
        texts.append(text)
        print(rows[-1], flush=True)
        if profile:
            step_profile.report(engine, _prompt())
        del engine  # its pool must be free before the next one is made
    if any(text != texts[0] for text in texts):
        raise AssertionError("the text depends on the pool size or on the graph")
    return {
        "shape": "qwen3-30b-a3b-fp8, random weights",
        "dtype": "bfloat16",
        "record_bytes": layout.record_bytes,
        "rows": rows,
        "same_text_in_every_case": True,
    }


def _prompt() -> list[int]:
    ids: list[int] = torch.randint(
        0, 150_000, (PROMPT,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return ids


def _measure(engine: Engine, generated: int) -> tuple[dict[str, Any], list[int | None]]:
    """The first run warms pool and kernels up and is not counted."""
    ids = _prompt()
    turns, text = [], []
    for repetition in range(REPETITIONS + 1):
        engine.reset_kv()
        turn = TurnStats(len(ids))
        sampling = SamplingParams(seed=repetition)
        for step in engine.generate(ids, sampling, max_tokens=generated + 1):
            turn.add(step)
            text.append(step.token_id)
        turns.append(turn)
    timed = turns[1:]
    return {
        f"pp{PROMPT}_tokens_per_s": _spread([t.prefill_tokens_per_second for t in timed]),
        f"tg{generated}_tokens_per_s": _spread([t.tokens_per_second for t in timed]),
        "decode_hit_rate": statistics.mean(t.decode_hit_rate for t in timed),
        "misses_per_token": statistics.mean(t.misses_per_token for t in timed),
        "fetch_gb_per_s": statistics.mean(t.decode.fetched_bytes / t.decode_s / 1e9 for t in timed),
        "peak_device_gib": torch.cuda.max_memory_allocated() / 2**30,
        "planned_device_gib": (
            engine.plan.resident_bytes
            + engine.plan.kv_bytes
            + engine.plan.workspace_bytes
            + engine.plan.pool_bytes
        )
        / 2**30,
    }, text


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "stddev": statistics.stdev(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", action="append", help="pool size; may be given more than once")
    parser.add_argument("--decode", choices=("graph", "eager"), default="graph")
    parser.add_argument("--generated", type=int, default=GENERATED)
    parser.add_argument("--profile", action="store_true", help="device time by kernel")
    args = parser.parse_args()
    cases = [(pool, args.decode) for pool in args.pool] if args.pool else CASES
    bench(cases, args.profile, args.generated)


if __name__ == "__main__":
    main()
