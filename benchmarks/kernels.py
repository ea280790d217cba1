"""How fast the decode kernels are, one by one, in the shapes of Qwen3-30B-A3B-FP8.

    python benchmarks/kernels.py [--json FILE] [--only NAME]

Each time is that of one kernel inside a captured graph whose calls go through several times the L2
cache in weights, the median of several replays. GB/s counts every byte that has to move once, %
compares with a device-to-device copy (bytes read plus written) or, for fetches, with a DMA copy
from pinned memory, both measured first.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

import torch

from benchmarks.reading import read_gate_up
from seqmoe_cli.bench.machine import Ceilings
from seqmoe_cli.bench.measure import count_kernels
from seqmoe_kernels import (
    READY,
    ExpertFormat,
    Matrix,
    Norm,
    PoolState,
    Resolved,
    Rotation,
    Routing,
    SamplingState,
    attention_step,
    choose,
    expert_format,
    expert_mlp,
    fetch,
    linears,
    normed_linear,
    resolve,
    rms_norm,
    sample,
)
from seqmoe_kernels.dense.tiling import down_tiling, gate_up_tiling
from seqmoe_kernels.experts.mlp import down, gate_up
from seqmoe_kernels.state import NUM_MARKS
from seqmoe_weights.layout import RecordLayout

HIDDEN, INTER, EXPERTS, TOP_K, LAYERS, VOCAB = 2048, 768, 128, 8, 48, 151936
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
QUERIES, KEYS = 32 * 128, 4 * 128
PART = HIDDEN * INTER
SCALES = PART // 128**2 * 4
LAYOUT = RecordLayout.for_experts(HIDDEN, INTER, "F8_E4M3")
FORMAT = expert_format(LAYOUT)
BF16_FORMAT = expert_format(RecordLayout.for_experts(HIDDEN, INTER, "BF16"))
NUM_SLOTS = 256  # 1.2 GB: a call never finds its weights in the L2 cache
BF16, F32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """One kernel: its calls differ in what they read, and each moves `num_bytes`."""

    name: str
    num_bytes: int
    calls: list[Callable[[], object]]
    over_link: bool = False


def microseconds(calls: list[Callable[[], object]], budget_s: float = 0.1) -> float:
    """The median time of one call inside a graph of all of them."""
    return _measured(calls, budget_s)[0]


def _measured(calls: list[Callable[[], object]], budget_s: float = 0.1) -> tuple[float, float]:
    """Microseconds of a call, and the kernels that it launches: one that is none of ours, to fill
    a tensor for instance, stands between two calls, and neither can read ahead."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    num_kernels = count_kernels(graph)
    graph.instantiate()
    first = _replay_ms(graph, 1)
    replays = max(1, min(200, int(budget_s * 1000 / 9 / max(first, 1e-3))))
    times = sorted(_replay_ms(graph, replays) / replays for _ in range(9))
    return times[4] * 1000 / len(calls), num_kernels / len(calls)


def _replay_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def random_codes(*shape: int) -> torch.Tensor:
    """FP8 bytes that are no NaN."""
    codes = torch.randint(0, 254, shape, dtype=torch.int16, device="cuda")
    return torch.where(codes >= 127, codes + 1, codes).to(torch.uint8)


def random_slots() -> torch.Tensor:
    slots = random_codes(NUM_SLOTS, FORMAT.record_bytes)
    for name in ("gate_scale", "up_scale", "down_scale"):
        offset = LAYOUT[name].offset
        slots[:, offset : offset + SCALES].view(F32).uniform_(1e-4, 2e-4)
    return slots


def random_matrices(rows: int, cols: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """As many copies as go beyond the L2 cache, at most 64."""
    count = max(2, min(64, 2**28 // (rows * cols * dtype.itemsize)))
    if dtype == torch.float8_e4m3fn:
        return [random_codes(rows, cols).view(dtype) for _ in range(count)]
    return [torch.randn((rows, cols), dtype=dtype, device="cuda") for _ in range(count)]


def orders_of_slots() -> list[torch.Tensor]:
    return list(torch.randperm(NUM_SLOTS, device="cuda").int().view(-1, TOP_K))


@functools.cache
def no_misses() -> torch.Tensor:
    """Their number, made once: a call of a chain must launch nothing but its kernels."""
    return torch.zeros(1, dtype=torch.int32, device="cuda")


def found(slots: torch.Tensor) -> Resolved:
    """As if all experts had been in their slots already."""
    return Resolved(slots, slots, slots, no_misses())


def fp8_matrices(*rows: int, cols: int) -> list[list[Matrix]]:
    """Groups of matrices that read one vector, as many groups as go beyond the L2 cache."""
    groups = [random_matrices(size, cols, torch.float8_e4m3fn) for size in rows]
    scales = [torch.rand((size // 128, cols // 128), device="cuda") for size in rows]
    return [
        [Matrix.of(w, s) for w, s in zip(ws, scales, strict=True)]
        for ws in zip(*groups, strict=False)
    ]


def matrix_cases() -> Iterator[Case]:
    x = torch.randn((1, HIDDEN), dtype=BF16, device="cuda")
    norm = Norm(torch.randn(HIDDEN, dtype=BF16, device="cuda"), 1e-6)
    groups = fp8_matrices(QUERIES, KEYS, KEYS, cols=HIDDEN)
    calls = [lambda g=g: linears(x, g, norm) for g in groups]
    num_bytes = (QUERIES + 2 * KEYS) * HIDDEN
    yield Case("norm, q, k, v (fp8)", num_bytes + num_bytes // 4096, calls)
    mixed = torch.randn((1, QUERIES), dtype=BF16, device="cuda")
    groups = fp8_matrices(HIDDEN, cols=QUERIES)
    calls = [lambda g=g: linears(mixed, g, None, x) for g in groups]
    yield Case("o and residual (fp8)", QUERIES * HIDDEN + QUERIES * HIDDEN // 4096, calls)
    weights = random_matrices(EXPERTS, HIDDEN, BF16)
    calls = [lambda w=w: normed_linear(x, norm, Matrix.of(w)) for w in weights]
    yield Case("norm, router (bf16)", 2 * EXPERTS * HIDDEN, calls)
    weights = random_matrices(VOCAB, HIDDEN, BF16)
    calls = [lambda w=w: linears(x, [Matrix.of(w)]) for w in weights]
    yield Case("lm_head (bf16)", 2 * VOCAB * HIDDEN, calls)


def bf16_slots() -> torch.Tensor:
    size = (NUM_SLOTS, BF16_FORMAT.record_bytes // 2)
    return torch.randn(size, dtype=torch.bfloat16, device="cuda").mul_(0.02).view(torch.uint8)


def expert_cases(kind: str, fmt: ExpertFormat, slots: torch.Tensor) -> Iterator[Case]:
    x = torch.randn((1, HIDDEN), dtype=BF16, device="cuda")
    act = torch.randn((TOP_K, INTER), dtype=BF16, device="cuda")
    shares = torch.rand(TOP_K, device="cuda")
    orders = orders_of_slots()
    part = TOP_K * (INTER * fmt.gate.row_bytes + SCALES * (fmt is FORMAT))
    wide, tall = gate_up_tiling(fmt.gate.row_bytes), down_tiling(TOP_K * fmt.down.row_bytes)
    calls = [lambda p=p: gate_up(x, slots, found(p), fmt, wide) for p in orders]
    yield Case(f"experts ({kind}): gate, up", 2 * part, calls)
    calls = [lambda p=p: read_gate_up(slots, p, fmt) for p in orders]
    yield Case(f"experts ({kind}): gate, up, only read", 2 * part, calls)
    calls = [lambda p=p: down(act, slots, p, shares, x, fmt, tall) for p in orders]
    yield Case(f"experts ({kind}): down, sum, residual", part, calls)
    calls = [lambda p=p: expert_mlp(x, x, slots, found(p), shares, fmt) for p in orders]
    yield Case(f"experts ({kind})", 3 * part, calls)


def small_cases() -> Iterator[Case]:
    x = torch.randn((1, HIDDEN), dtype=BF16, device="cuda")
    gain = torch.randn(HIDDEN, dtype=BF16, device="cuda")
    yield Case("rms_norm", 6 * HIDDEN, [lambda: rms_norm(x, gain, 1e-6)] * 32)


def sampling_cases() -> Iterator[Case]:
    settings = {  # temperature, top_k, top_p, min_p
        "greedy": (0, 0, 1, 0),
        "without filters": (1, 0, 1, 0),
        "top-k": (0.7, 20, 1, 0),
        "top-p": (0.7, 0, 0.95, 0),
        "all filters": (0.7, 20, 0.95, 0.05),
    }
    logits = torch.randn(VOCAB, device="cuda").mul(3).bfloat16().float()
    for name, filters in settings.items():
        state = SamplingState(
            torch.tensor((*filters, 1.1, 0.1, 0.1), device="cuda"),
            torch.tensor([7, 0], device="cuda"),
            torch.zeros(VOCAB, device="cuda"),
            torch.zeros(VOCAB, dtype=torch.bool, device="cuda"),
        )
        yield Case(f"sample, {name}", 9 * VOCAB, [lambda s=state: sample(logits, s)] * 32)


def attention_case(context: int, num_states: int = 8) -> Case:
    """Attention behind `context` tokens, the new one among them, over so many layers' KV states."""
    shape = (num_states, 2, max(context, 8192), KV_HEADS, HEAD_DIM)
    states = torch.randn(shape, dtype=BF16, device="cuda")
    row = torch.randn((1, (HEADS + 2 * KV_HEADS) * HEAD_DIM), dtype=BF16, device="cuda")
    qkv = row.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], 1)
    gain = torch.randn(HEAD_DIM, dtype=BF16, device="cuda")
    rotation = Rotation(torch.rand(HEAD_DIM // 2, device="cuda"), gain, gain, 1e-6)
    position = torch.tensor([context - 1], device="cuda")
    calls = [
        lambda s=state: attention_step(*qkv, *s, position, rotation, HEAD_DIM**-0.5)
        for state in states
    ]
    return Case(f"attention at {context}", 2 * 2 * context * KV_HEADS * HEAD_DIM, calls)


def attention_us(context: int, num_layers: int) -> float:
    """Microseconds of one layer's attention behind `context` tokens."""
    return microseconds(attention_case(context, num_layers).calls)


def residency_cases(slots: torch.Tensor) -> Iterator[Case]:
    num_experts, num_slots = LAYERS * EXPERTS, LAYERS * EXPERTS * 45 // 100
    logits = torch.randn((64, 1, EXPERTS), dtype=BF16, device="cuda")
    routing = Routing(EXPERTS, TOP_K, True)
    pool = full_pool(num_experts, num_slots)
    calls = [lambda g=g: choose(g, 0, routing, pool) for g in logits]
    yield Case("route and resolve, no miss", 0, calls)
    # So many new experts in a row that LRU has dropped the first when they come round again.
    fresh = torch.arange(num_slots, num_experts, dtype=torch.int32, device="cuda")
    for missing in (2, TOP_K):
        pool = full_pool(num_experts, num_slots)
        kept = torch.arange(TOP_K - missing, dtype=torch.int32, device="cuda")
        parts = fresh[: len(fresh) // missing * missing].split(missing)
        wanted = [torch.cat((kept, part)) for part in parts]
        calls = [lambda w=w, p=pool: resolve(w, p) for w in wanted]
        yield Case(f"resolve with {missing} misses", 12 * num_slots, calls)
    records = torch.randint(0, 127, (NUM_SLOTS, FORMAT.record_bytes), dtype=torch.uint8)
    records = records.pin_memory()
    marks = torch.zeros(NUM_MARKS, dtype=torch.int64, device="cuda")
    for missing in (0, 1, TOP_K):
        ids = torch.randperm(NUM_SLOTS, device="cuda").int().view(-1, TOP_K)
        count = torch.tensor([missing], dtype=torch.int32, device="cuda")
        misses = [Resolved(e, e, e, count) for e in ids]
        calls = [lambda m=m: fetch(records, slots, m, marks) for m in misses]
        num_bytes = missing * FORMAT.record_bytes
        yield Case(f"fetch of {missing} records", num_bytes, calls, over_link=True)


def full_pool(num_experts: int, num_slots: int) -> PoolState:
    pool = PoolState.cold(num_experts, num_slots, torch.device("cuda"))
    pool.owner.copy_(torch.arange(num_slots))
    pool.slot_of[:num_slots] = pool.owner
    pool.score.copy_(pool.owner + 1)
    pool.state.fill_(READY)
    pool.clock.fill_(num_slots + 1)
    return pool


def all_cases() -> Iterator[Case]:
    slots = random_slots()
    yield from small_cases()
    yield from sampling_cases()
    yield from matrix_cases()
    yield from expert_cases("fp8", FORMAT, slots)
    yield from expert_cases("bf16", BF16_FORMAT, bf16_slots())
    for context in (128, 512, 4096, 16384):
        yield attention_case(context)
    yield from residency_cases(slots)


def bench(only: str = "") -> dict[str, Any]:
    """Measure the cases whose name contains `only`; returns the ceilings and one row for each."""
    records = torch.zeros((1, 2**28), dtype=torch.uint8, pin_memory=True)
    measured = Ceilings.measure(records, torch.device("cuda"))
    ceilings = {"copy": measured.copy_gb_per_s, "link": measured.link_gb_per_s}
    print(f"copy {ceilings['copy']:.0f} GB/s, link {ceilings['link']:.1f} GB/s", flush=True)
    rows = []
    for case in all_cases():
        if only not in case.name:
            continue
        us, num_kernels = _measured(case.calls)
        rate = case.num_bytes / us / 1e3
        ceiling = ceilings["link" if case.over_link else "copy"]
        rows.append(
            {
                "kernel": case.name,
                "us": us,
                "kernels": num_kernels,
                "gb_per_s": rate,
                "percent": 100 * rate / ceiling,
            }
        )
        print(
            f"{case.name:38}{us:9.2f} us{rate:9.1f} GB/s{100 * rate / ceiling:7.1f} %"
            f"{num_kernels:5.1f} kernels",
            flush=True,
        )
    return {"gpu": torch.cuda.get_device_name(), "gb_per_s": ceilings, "kernels": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    parser.add_argument("--only", default="", help="part of the kernel's name")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/kernels.py: no usable CUDA device", file=sys.stderr)
        return 1
    result = bench(args.only)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
