"""How long one step of a predictor takes, alone and in a CUDA graph.

python benchmarks/predictor_step.py [FILE]

Without FILE a random one of Qwen3-30B-A3B's shape. Prints one JSON object: times in microseconds,
kernels of the graph, bytes of weights.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from seqmoe_cli.forecast.predictor import Predictor, PredictorShape
from seqmoe_cli.forecast.predictor_step import PredictorStep
from seqmoe_cli.forecast.stored import open_predictor

QWEN3 = {"num_layers": 48, "num_experts": 128, "top_k": 8, "vocab_size": 151_936}
STEPS = 200


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if len(sys.argv) > 1:
        predictor = open_predictor(Path(sys.argv[1]), device).predictor
    else:
        predictor = Predictor(PredictorShape.fitting(**QWEN3))
    step = PredictorStep(predictor, device, torch.bfloat16)
    shape = predictor.shape
    used = torch.randperm(shape.num_flat)[: shape.num_used]
    step.used.copy_(used)
    found: dict[str, object] = {"shape": shape.as_dict(), "bytes": shape.num_bytes}
    found["eager_us"] = timed(step, device)
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        found["graph_us"] = timed(graph.replay, device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            torch.cuda.synchronize()
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        found["kernels"] = len(kernels)
        found["busy_us"] = sum(event.device_time for event in kernels)
    print(json.dumps(found))


def timed(run: object, device: torch.device) -> float:
    assert callable(run)
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
