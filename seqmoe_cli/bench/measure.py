"""Runs benchmark cases on an opened engine: the depth first, then the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seqmoe_cli.bench.matrix import Case
from seqmoe_cli.bench.rows import Sample
from seqmoe_cli.residency.stats import StepStats
from seqmoe_cli.settings import SamplingParams

if TYPE_CHECKING:
    from seqmoe_cli.engine.engine import Engine
    from seqmoe_cli.residency.replayed import ReplayedRouting

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
    engine: Engine, case: Case, plan: Plan, replayed: ReplayedRouting | None, tell: Tell
) -> Iterator[tuple[str, list[Sample]]]:
    """The samples of a case, per state of the pool.

    Cold: the pool is emptied before each repetition. Warm: the pool holds what running the same
    tokens has left in it. One untimed run, which also has kernels compiled and memory touched,
    comes before both. A routing that is replayed starts from an empty pool, but where all experts
    have a place it is run warm, which is the full load that the other pools are compared with.
    """
    if plan.warmup:
        tell(f"{case.name}: warm-up")
        _run_once(engine, case, plan, replayed, cold=False)
    for state in _states(engine, plan, replayed):
        samples = []
        for index in range(plan.repetitions):
            tell(f"{case.name} {state}: run {index + 1} of {plan.repetitions}")
            samples.append(_run_once(engine, case, plan, replayed, cold=state == COLD))
        yield state, samples


def _states(engine: Engine, plan: Plan, replayed: ReplayedRouting | None) -> tuple[str, ...]:
    if not plan.warmup:
        return (COLD,)
    if replayed is None:
        return COLD, WARM
    holds_all = engine.plan.num_slots == engine.config.num_routed_experts
    return (WARM,) if holds_all else (COLD,)


def _run_once(
    engine: Engine, case: Case, plan: Plan, replayed: ReplayedRouting | None, cold: bool
) -> Sample:
    """One run: the context up to the depth is put in place untimed, then the case is timed.

    A generated token is one step at the depth reached so far. The steps before the timed ones begin
    with the token of the text behind the depth, which is evaluated as a prompt.
    """
    _go_to_depth(engine, list(plan.ids[: case.depth]))
    if cold:
        engine.reset_pool()
    if replayed is not None:
        replayed.rewind()
    prompt = list(plan.ids[: case.text_tokens])
    length = case.num_untimed + case.num_gen if case.num_gen else 1
    total = StepStats("decode")
    start = time.perf_counter_ns()
    steps = engine.generate(prompt, plan.sampling, max_tokens=length, stop_ids=())
    for number, step in enumerate(steps, 1):
        if number > case.num_untimed:
            total += step.stats
        elif number == case.num_untimed:
            start = time.perf_counter_ns()
    elapsed = time.perf_counter_ns() - start
    if total.num_tokens != case.num_timed:
        raise AssertionError(f"{case.name} put {total.num_tokens} tokens through the model")
    return Sample(elapsed, total)


def _go_to_depth(engine: Engine, ids: list[int]) -> None:
    """Make the KV state hold exactly `ids`; what of them it already holds is reused."""
    if not ids:
        engine.reset_kv()
        return
    for _ in engine.generate(ids, SamplingParams(temperature=0), max_tokens=1, stop_ids=()):
        pass
