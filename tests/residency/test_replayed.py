"""ReplayedRouting: by itself, and in an engine, where single tokens use the recorded experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from seqmoe_cli.engine.decoding import EagerSteps, GraphSteps
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.forecast.recorder import TraceRecorder
from seqmoe_cli.forecast.trace import Trace
from seqmoe_cli.residency.replayed import ReplayedRouting
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_kernels import PoolState, Routing, choose, route
from tests.checkpoints import packed_model
from tools.simulator.policies import lru
from tools.simulator.replay import replay

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
STEPS, LAYERS, EXPERTS, TOP_K = 12, 3, 8, 2


def made_up_trace() -> Trace:
    rng = np.random.default_rng(0)
    experts = [rng.permutation(EXPERTS)[:TOP_K] for _ in range(STEPS * LAYERS)]
    return Trace(
        model="none",
        family="none",
        num_experts=EXPERTS,
        experts=np.array(experts, np.uint8).reshape(STEPS, LAYERS, TOP_K),
        sequence=np.zeros(STEPS, np.uint32),
        phase=np.ones(STEPS, np.uint8),
    )


def test_one_step_after_the_other_and_round_again() -> None:
    ids = torch.arange(3 * 2 * 2, dtype=torch.uint8).view(3, 2, 2)
    routing, rule = ReplayedRouting(ids, CPU), Routing(12, 2, True)
    step = routing.recorded.step

    def chosen(layer: int) -> list[int]:
        pool, logits = PoolState.cold(2 * 12, 4, CPU), torch.arange(12.0).unsqueeze(0)
        choice = choose(logits, layer, rule, pool, routing.recorded)
        assert torch.equal(choice.weights, route(logits, 2, True)[1][0])  # the router's own
        return (choice.wanted - 12 * layer).tolist()

    for n in (0, 1, 2, 0, 1):
        for layer in (0, 1):
            assert chosen(layer) == ids[n, layer].tolist()
        routing.advance()
    routing.rewind(1)
    assert chosen(1) == ids[1, 1].tolist()
    assert routing.recorded.step is step


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_model(tmp_path_factory.mktemp("replayed") / "model", "qwen3_moe")


@pytest.fixture(params=["cpu", "ahead", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(packed: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    device = "cuda" if request.param == "cuda" else "cpu"
    size = PoolSize.parse("7slots")
    options = EngineOptions(size, device, "float32", 64, policy="lru", prefetch="off")
    engine = Engine.open(packed, options)
    if request.param == "ahead":
        assert isinstance(engine.decoding.issue, EagerSteps)
        engine.decoding.issue.ahead = 1
    yield engine
    engine.close()


def test_misses_of_every_step_are_those_of_the_simulator(engine: Engine) -> None:
    """Also in the second round, which on a GPU is replayed from one graph throughout."""
    trace = made_up_trace()
    routing = ReplayedRouting(torch.from_numpy(trace.experts), engine.device)
    engine.replay(routing)
    expected = replay(trace, engine.plan.num_slots, lru).loads.sum(1).tolist()
    for _ in range(2):
        engine.reset_kv()
        engine.reset_pool()
        routing.rewind()
        steps = list(engine.generate([5], GREEDY, max_tokens=STEPS))
        assert [step.stats.misses for step in steps] == expected
        assert len(set(expected)) > 3
    if engine.device.type == "cuda":
        issue = engine.decoding.issue
        assert isinstance(issue, GraphSteps) and issue.graph is not None


def test_prompts_are_routed_by_the_router(engine: Engine) -> None:
    """And replayed single tokens have the recorded experts, with the weights of the router."""
    trace = made_up_trace()
    plain, replayed = (TraceRecorder("m", engine.config, weights=True) for _ in range(2))
    prompt = list(range(20, 31))
    for recorder in (plain, replayed):
        engine.reset_kv()
        recorder.begin(len(prompt))
        engine.record(recorder)
        list(engine.generate(prompt, GREEDY, max_tokens=2))
        engine.replay(ReplayedRouting(torch.from_numpy(trace.experts), engine.device))
    engine.record(None)
    usual, found = plain.trace(), replayed.trace()
    assert usual.weights is not None and found.weights is not None
    assert np.array_equal(found.experts[:-1], usual.experts[:-1])
    assert np.array_equal(found.experts[-1], trace.experts[0])
    assert not np.array_equal(usual.experts[-1], trace.experts[0])
    assert np.array_equal(found.weights[-1, 0], usual.weights[-1, 0])
