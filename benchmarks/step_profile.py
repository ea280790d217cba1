"""Where the time of one decode step goes: replays back to back, then kernel by kernel."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from seqmoe_cli.engine.decoding import GraphSteps
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.settings import SamplingParams

REPLAYS = 50


@torch.inference_mode()
def report(engine: Engine, prompt: list[int], num_rows: int = 40) -> dict[str, Any]:
    """Print and return the time of a step on the device alone, and what its kernels take.

    The steps follow a real prompt; the KV state they leave behind counts for nothing.
    """
    for _ in engine.generate(prompt, SamplingParams(seed=0), max_tokens=8):
        pass
    issue = engine.decoding.issue
    by_events, launch_ms = _timed(issue, REPLAYS)
    wall = _wall(issue, REPLAYS)
    print(
        f"device alone {by_events:.3f} ms a step (wall {wall:.3f}), "
        f"host {launch_ms:.3f} ms to issue one",
        flush=True,
    )
    result: dict[str, Any] = {"step_ms": by_events, "wall_ms": wall, "issue_ms": launch_ms}
    try:
        kernels = _kernels(issue, 4)
    except RuntimeError as error:  # a machine without CUPTI
        print(f"no kernel times: {error}")
        return result
    total = sum(us for _, us in kernels.values())
    count = sum(n for n, _ in kernels.values())
    print(f"{count:.0f} kernels a step, {total / 1e3:.3f} ms busy, graph: {_is_graph(issue)}")
    rows = sorted(kernels.items(), key=lambda row: -row[1][1])
    for name, (n, us) in rows[:num_rows]:
        print(f"  {us:8.1f} us  {100 * us / total:5.1f} %  x{n:<6.1f} {us / n:7.2f} us  {name}")
    result |= {"kernels": count, "busy_ms": total / 1e3, "by_kernel": dict(rows)}
    return result


def _is_graph(issue: object) -> bool:
    return isinstance(issue, GraphSteps) and issue.graph is not None


def _timed(issue: Callable[[], None], count: int) -> tuple[float, float]:
    """Milliseconds per step between events on the device, and to issue one on the host."""
    spans, launches = [], []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        began = time.perf_counter()
        for _ in range(count):
            issue()
        launches.append((time.perf_counter() - began) / count * 1e3)
        end.record()
        torch.cuda.synchronize()
        spans.append(start.elapsed_time(end) / count)
    return statistics.median(spans), statistics.median(launches)


def _wall(issue: Callable[[], None], count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        issue()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e3


def _kernels(issue: Callable[[], None], count: int) -> dict[str, tuple[float, float]]:
    """Kernel name -> launches and microseconds per step."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(count):
            issue()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or []:
        if event.device_type.name == "CUDA":
            times[event.name[:90]].append(event.device_time_total)
    if not times:
        raise RuntimeError("the profiler saw no kernels")
    return {name: (len(us) / count, sum(us) / count) for name, us in times.items()}
