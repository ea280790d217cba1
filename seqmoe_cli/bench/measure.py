"""Runs benchmark cases on an opened engine: the depth first, then the clock. Counts the kernels
that a decode step is made of."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from seqmoe_cli.bench.matrix import Case
from seqmoe_cli.bench.rows import Sample
from seqmoe_cli.engine.decoding import captured
from seqmoe_cli.residency.stats import StepStats
from seqmoe_cli.settings import SamplingParams

if TYPE_CHECKING:
    from seqmoe_cli.engine.engine import Engine
    from seqmoe_cli.residency.replayed import ReplayedRouting

COLD, WARM = "cold", "warm"
Tell = Callable[[str], None]
_KERNEL_NODE = 0  # of the types of a CUDA graph's nodes


@dataclass(frozen=True)
class Runs:
    """How cases are run: `ids` is the text they read, `sampling` chooses the generated tokens; it
    has a seed, so that all repetitions at all pool sizes time the same tokens. Without `warmup`
    nothing runs untimed and there are no warm samples. `replayed`: in the place of the router."""

    engine: Engine
    ids: Sequence[int]
    sampling: SamplingParams
    repetitions: int
    warmup: bool
    replayed: ReplayedRouting | None

    def samples(self, case: Case, tell: Tell) -> Iterator[tuple[str, list[Sample]]]:
        """The samples of a case, per state of the pool.

        Cold: the pool is emptied before each repetition. Warm: the pool holds what running the same
        tokens has left in it. One untimed run, which also has kernels compiled and memory touched,
        comes before both. A routing that is replayed starts from an empty pool, but where all
        experts have a place it is run warm, which is the full load that other pools are compared
        with.
        """
        if self.warmup:
            tell(f"{case.name}: warm-up")
            self._run(case, cold=False)
        for state in self._states():
            samples = []
            for index in range(self.repetitions):
                tell(f"{case.name} {state}: run {index + 1} of {self.repetitions}")
                samples.append(self._run(case, cold=state == COLD))
            yield state, samples

    def _states(self) -> tuple[str, ...]:
        if not self.warmup:
            return (COLD,)
        if self.replayed is None:
            return COLD, WARM
        holds_all = self.engine.plan.num_slots == self.engine.config.num_routed_experts
        return (WARM,) if holds_all else (COLD,)

    def _run(self, case: Case, cold: bool) -> Sample:
        """One run: the context up to the depth is put in place untimed, then the case is timed.

        A generated token is one step at the depth reached so far. The steps before the timed ones
        begin with the token of the text behind the depth, which is evaluated as a prompt.
        """
        self._go_to_depth(list(self.ids[: case.depth]))
        if cold:
            self.engine.reset_pool()
        if self.replayed is not None:
            self.replayed.rewind()
        prompt = list(self.ids[: case.text_tokens])
        length = case.num_untimed + case.num_gen if case.num_gen else 1
        total = StepStats("decode")
        start = time.perf_counter_ns()
        steps = self.engine.generate(prompt, self.sampling, max_tokens=length, stop_ids=())
        for number, step in enumerate(steps, 1):
            if number > case.num_untimed:
                total += step.stats
            elif number == case.num_untimed:
                start = time.perf_counter_ns()
        elapsed = time.perf_counter_ns() - start
        if total.num_tokens != case.num_timed:
            raise AssertionError(f"{case.name} put {total.num_tokens} tokens through the model")
        return Sample(elapsed, total)

    def _go_to_depth(self, ids: list[int]) -> None:
        """Make the KV state hold exactly `ids`; what of them it already holds is reused."""
        if not ids:
            self.engine.reset_kv()
            return
        greedy = SamplingParams(temperature=0)
        for _ in self.engine.generate(ids, greedy, max_tokens=1, stop_ids=()):
            pass


def kernels_per_token(engine: Engine) -> int | None:
    """Kernels of a captured decode step; None on a CPU, and where the driver does not say. The
    engine must have decoded before, so that nothing is left to compile. Runs nothing."""
    if engine.device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.inference_mode(), captured(graph):
        engine.decoding.step()
    try:
        return count_kernels(graph)
    except (OSError, RuntimeError):
        return None


def count_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """Kernels in a graph that was captured with `keep_graph`. OSError without a CUDA driver,
    RuntimeError where it does not say."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    _check(driver.cuGraphGetNodes(handle, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _check(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)))
    kinds = []
    for node in nodes:
        kind = ctypes.c_int()
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        kinds.append(kind.value)
    return kinds.count(_KERNEL_NODE)


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"the CUDA driver reports error {error}")
