"""Runs benchmark cases on an opened engine: the depth first, then the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seqmoe_cli.bench.matrix import Case
from seqmoe_cli.bench.rows import Sample
from seqmoe_cli.engine.stats import StepStats
from seqmoe_cli.settings import SamplingParams

if TYPE_CHECKING:
    from seqmoe_cli.engine.engine import Engine

COLD, WARM = "cold", "warm"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How cases are run: `ids` is the text they read, `sampling` chooses the generated tokens.

    `sampling` has a seed, so that all repetitions at all pool sizes time the same tokens. Without
    `warmup` nothing runs untimed and there are no warm samples.
    """

    ids: Sequence[int]
    sampling: SamplingParams
    repetitions: int
    warmup: bool


def run_case(
    engine: Engine, case: Case, plan: Plan, tell: Tell
) -> Iterator[tuple[str, list[Sample]]]:
    """The samples of a case, per state of the pool.

    Cold: the pool is emptied before each repetition. Warm: the pool holds what running the same
    tokens has left in it. One untimed run, which also has kernels compiled and memory touched,
    comes before both.
    """
    if plan.warmup:
        tell(f"{case.name}: warm-up")
        _run_once(engine, case, plan, cold=False)
    for state in (COLD, WARM) if plan.warmup else (COLD,):
        samples = []
        for index in range(plan.repetitions):
            tell(f"{case.name} {state}: run {index + 1} of {plan.repetitions}")
            samples.append(_run_once(engine, case, plan, cold=state == COLD))
        yield state, samples


def _run_once(engine: Engine, case: Case, plan: Plan, cold: bool) -> Sample:
    """One run: the context up to the depth is put in place untimed, then the case is timed.

    A generated token is one step at the depth reached so far; the first step takes the token of
    the text behind the depth.
    """
    _go_to_depth(engine, list(plan.ids[: case.depth]))
    if cold:
        engine.reset_pool()
    prompt = list(plan.ids[: case.text_tokens])
    total = StepStats("decode")
    start = time.perf_counter_ns()
    for step in engine.generate(prompt, plan.sampling, max_tokens=case.num_gen or 1, stop_ids=()):
        total += step.stats
    elapsed = time.perf_counter_ns() - start
    if total.num_tokens != case.num_timed:
        raise AssertionError(f"{case.name} put {total.num_tokens} tokens through the model")
    return Sample(elapsed, total.num_tokens, total.hits, total.misses, total.fetched_bytes)


def _go_to_depth(engine: Engine, ids: list[int]) -> None:
    """Make the KV state hold exactly `ids`; what of them it already holds is reused."""
    if not ids:
        engine.reset_kv()
        return
    for _ in engine.generate(ids, SamplingParams(temperature=0), max_tokens=1, stop_ids=()):
        pass
