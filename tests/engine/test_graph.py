"""Steps that run ahead of the host, on a GPU as replays of one graph: the same answers, step by
step, as operation by operation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from seqmoe_cli.engine.decoding import EagerSteps, GraphSteps
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.stats import Step
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from tests.checkpoints import packed_model

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=1.0, seed=7)
PROMPT = [i * 7 % 200 for i in range(120)]  # answers cross a span of attention at 128
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_model(
        tmp_path_factory.mktemp("graph") / "model", "qwen3_moe", fp8=request.param == "fp8"
    )


def open_engine(packed: Path, device: str, dtype: str, pool: str, eager: bool) -> Engine:
    """On a CPU there is no graph: what is not eager runs two steps ahead there."""
    size = PoolSize.parse(pool)
    options = EngineOptions(size, device, dtype, ctx_size=400, policy="lru", prefetch="off")
    engine = Engine.open(packed, options, eager=eager)
    if device == "cpu" and not eager:
        assert isinstance(engine.decoding.issue, EagerSteps)
        engine.decoding.issue.ahead = 2
    return engine


@pytest.fixture(params=DEVICES)
def pair(request: pytest.FixtureRequest, packed: Path) -> Iterator[tuple[Engine, Engine]]:
    """An eager engine and one that runs ahead."""
    eager = open_engine(packed, request.param, "float32", "45%", eager=True)
    ahead = open_engine(packed, request.param, "float32", "45%", eager=False)
    yield eager, ahead
    eager.close()
    ahead.close()


def essence(step: Step) -> tuple[object, ...]:
    """All of a step but the time it took."""
    s = step.stats
    return step.token_id, step.finish_reason, s.phase, s.num_tokens, s.hits, s.misses


def answer(
    engine: Engine, prompt: list[int], params: SamplingParams, length: int, **ends: Any
) -> list[Step]:
    return list(engine.generate(prompt, params, max_tokens=length, **ends))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pool", ["2slots", "25%", "all"])
def test_every_step_is_the_same(packed: Path, device: str, dtype: str, pool: str) -> None:
    """Text, hits and misses; over more steps than the ring has entries and a second turn."""
    eager = open_engine(packed, device, dtype, pool, eager=True)
    ahead = open_engine(packed, device, dtype, pool, eager=False)
    for params in (GREEDY, SEEDED):
        prompt = list(PROMPT)
        for length in (70, 10):
            expected = answer(eager, prompt, params, length)
            steps = answer(ahead, prompt, params, length)
            assert [essence(s) for s in steps] == [essence(s) for s in expected]
            assert ahead.token_ids == eager.token_ids
            prompt += [*(s.token_id for s in steps if s.token_id is not None), 5, 6]
    counters = (engine.pool.counters() for engine in (ahead, eager))
    assert len({tuple(c[:2]) for c in counters}) == 1  # hits and misses
    eager.close()
    ahead.close()


def test_settings_change_without_a_new_graph(pair: tuple[Engine, Engine]) -> None:
    eager, ahead = pair
    graphs = set()
    settings = [
        GREEDY,
        SEEDED,
        SamplingParams(temperature=0, repeat_penalty=1.5, frequency_penalty=0.5),
        SamplingParams(temperature=1.5, top_k=0, top_p=0.9, min_p=0.0, seed=3),
        SamplingParams(temperature=0.7, top_k=5, presence_penalty=1.0, seed=3),
        SamplingParams(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=4),
        GREEDY,
    ]
    texts = set()
    for params in settings:
        steps = answer(ahead, PROMPT, params, 12)
        expected = answer(eager, PROMPT, params, 12)
        assert [s.token_id for s in steps] == [s.token_id for s in expected]
        texts.add(tuple(s.token_id for s in steps))
        if isinstance(ahead.decoding.issue, GraphSteps):
            graphs.add(ahead.decoding.issue.graph)
    assert len(texts) > 4
    assert None not in graphs and len(graphs) <= 1


def test_a_stop_token_discards_what_ran_beyond_it(pair: tuple[Engine, Engine]) -> None:
    eager, ahead = pair
    plain = [s.token_id for s in answer(eager, PROMPT, SEEDED, 30)]
    for at in (1, 2, 5, 17):
        for engine in pair:
            engine.reset_kv()  # a prompt evaluated in other pieces has other last bits
        expected, steps = (answer(e, PROMPT, SEEDED, 30, stop_ids={plain[at]}) for e in pair)
        assert [s.token_id for s in steps] == [*plain[: len(steps) - 1], None]
        assert [s.finish_reason for s in steps] == [s.finish_reason for s in expected]
        assert steps[-1].finish_reason == "stop"
        assert ahead.token_ids == eager.token_ids
        again, expected = (answer(e, [*PROMPT, plain[0]], SEEDED, 9) for e in pair)
        assert [s.token_id for s in again] == [s.token_id for s in expected]


def test_counters_are_those_of_delivered_steps(pair: tuple[Engine, Engine]) -> None:
    _, ahead = pair
    layers, top_k = ahead.config.num_hidden_layers, ahead.config.num_experts_per_tok
    for steps in (3, 4):
        stream = ahead.generate(PROMPT, SEEDED)
        taken = [next(stream) for _ in range(steps)]
        stream.close()
        assert all(s.stats.hits + s.stats.misses == layers * top_k for s in taken[1:])
        assert ahead.token_ids == [*PROMPT, *(s.token_id for s in taken[:-1])]


def test_the_context_is_filled_to_its_end_and_not_beyond(pair: tuple[Engine, Engine]) -> None:
    eager, ahead = pair
    long = [i % 200 for i in range(390)]
    expected, steps = (list(engine.generate(long, SEEDED)) for engine in pair)
    assert [essence(s) for s in steps] == [essence(s) for s in expected]
    assert len(steps) == 11 and steps[-1].finish_reason == "length"
    assert len(ahead.token_ids) == ahead.ctx_size
    assert torch.equal(ahead.kv.keys, eager.kv.keys)
    assert [essence(s)[0] for s in answer(ahead, PROMPT, GREEDY, 9)] == [
        essence(s)[0] for s in answer(eager, PROMPT, GREEDY, 9)
    ]


def test_turns_ended_in_every_way_leave_nothing_behind(pair: tuple[Engine, Engine]) -> None:
    """Closed, interrupted, edited, forgotten, cold: the next answer is the eager one's."""
    eager, ahead = pair
    expected = [s.token_id for s in answer(eager, PROMPT, SEEDED, 20)]
    other = [3, *PROMPT[:50]]
    for close_after in range(1, 5):
        stream = ahead.generate(PROMPT, SEEDED)
        for _ in range(close_after):
            next(stream)
        stream.close()
        polls = iter([False] * 8 + [True])
        steps = list(ahead.generate(other, SEEDED, interrupted=lambda p=polls: next(p)))
        assert (steps[-1].finish_reason, steps[-1].token_id) == ("interrupted", None)
        if close_after == 2:
            ahead.reset_pool()
        if close_after == 3:
            ahead.reset_kv()
        assert [s.token_id for s in answer(ahead, PROMPT, SEEDED, 20)] == expected


@pytest.mark.gpu
def test_a_gpu_decodes_by_one_graph(packed: Path) -> None:
    engine = open_engine(packed, "cuda", "bfloat16", "45%", eager=False)
    issue = engine.decoding.issue
    assert isinstance(issue, GraphSteps) and issue.graph is None
    answer(engine, PROMPT, GREEDY, 4)
    graph = issue.graph
    assert graph is not None and issue.ahead >= 1
    answer(engine, PROMPT[:30], SEEDED, 40)
    assert issue.graph is graph
    engine.close()


def test_times_by_the_clock_of_the_device(pair: tuple[Engine, Engine]) -> None:
    """Every decode step lasts and lies apart from the one before it; misses are waited for."""
    for engine in pair:
        steps = answer(engine, PROMPT, SEEDED, 20)[1:]
        assert all(step.stats.step_s > 0 and step.stats.gap_s > 0 for step in steps)
        assert any(step.stats.misses for step in steps)
        # what the last layer waits for is counted by the first layer of the next step
        assert sum(step.stats.stall_s for step in steps) > 0


@pytest.mark.gpu
def test_a_graph_that_nothing_uses_does_not_spoil_a_capture() -> None:
    """It sits in a reference cycle, so that only the garbage collector frees it."""
    number = torch.zeros(1, device="cuda")
    old = GraphSteps(lambda: number.add_(1))
    old(), old()
    unused = [old.graph]
    unused.append(unused)
    del old, unused

    def step() -> None:
        kept = [[] for _ in range(100_000)]  # enough new objects for every generation
        number.add_(len(kept))

    new = GraphSteps(step)
    new(), new()
    assert number.item() == 2 + 2 * 100_000
