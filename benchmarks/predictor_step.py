"""How long one step of a predictor takes, alone and in a CUDA graph.

python benchmarks/predictor_step.py [FILE]

Without FILE a random one of Qwen3-30B-A3B's shape. Prints one JSON object: times in microseconds,
kernels of the graph, bytes of weights. Before each timed step the L2 cache is filled with other
things, as the layers of a model do; `hot_us` is without that. The time of a kernel is that of a
profiler, from its launch on: one that starts early waits within it.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from seqmoe_cli.forecast.predictor import Predictor, PredictorShape
from seqmoe_cli.forecast.predictor_step import PredictorStep
from seqmoe_cli.forecast.stored import open_predictor

QWEN3 = {"num_layers": 48, "num_experts": 128, "top_k": 8, "vocab_size": 151_936}
STEPS = 200
PROFILED = 20
OTHER_BYTES = 256 * 2**20  # several times an L2 cache


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if len(sys.argv) > 1:
        predictor = open_predictor(Path(sys.argv[1]), device).predictor
    else:
        predictor = Predictor(PredictorShape.fitting(**QWEN3))
    shape = predictor.shape
    step = PredictorStep(predictor, device, torch.bfloat16)
    layers = [torch.randperm(shape.num_experts)[: shape.top_k] for _ in range(shape.num_layers)]
    offsets = torch.arange(shape.num_layers)[:, None] * shape.num_experts
    step.used.copy_((torch.stack(layers) + offsets).flatten())
    found: dict[str, object] = {"shape": shape.as_dict(), "bytes": shape.num_bytes}
    found["eager_us"] = timed(step, device)
    if device.type == "cuda":
        found |= in_graphs(step, device)
    print(json.dumps(found))


def in_graphs(step: PredictorStep, device: torch.device) -> dict[str, object]:
    others = torch.zeros(OTHER_BYTES // 4, device=device)

    def evict() -> None:
        others.add_(1)

    def both() -> None:
        evict()
        step()

    hot, cold, empty = (captured(work) for work in (step, both, evict))
    times = [timed(cold.replay, device) - timed(empty.replay, device) for _ in range(5)]
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(PROFILED):
            cold.replay()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name].append(event.device_time)
    own = {name: times for name, times in kernels.items() if name.endswith("_kernel")}
    return {
        "graph_us": sorted(times)[2],
        "hot_us": timed(hot.replay, device),
        "kernels": sum(map(len, own.values())) / PROFILED,
        "kernel_us": {name: round(sorted(t)[len(t) // 2], 2) for name, t in own.items()},
    }


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def timed(run: Callable[[], object], device: torch.device) -> float:
    for _ in range(3):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - began) / STEPS


if __name__ == "__main__":
    main()
