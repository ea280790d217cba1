"""TraceRecorder on a real engine, against the routing that transformers computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.forecast.recorder import TraceRecorder, projection
from seqmoe_cli.forecast.trace import Trace
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams

GREEDY = SamplingParams(temperature=0)
Packed = Callable[..., Path]
LONG = torch.randint(0, 300, (300,), generator=torch.manual_seed(1)).tolist()
"""More tokens than one chunk of a prefill on the CPU."""


@pytest.fixture
def engine(packed: Packed) -> Iterator[Engine]:
    engine = Engine.open(
        packed("qwen3_moe"), EngineOptions(PoolSize.parse("5slots"), "cpu", "float32")
    )
    yield engine
    engine.close()


def answer(engine: Engine, recorder: TraceRecorder, prompt: list[int], count: int) -> list[int]:
    """Prompt and answer without the last token, which is not evaluated."""
    engine.reset_kv()
    recorder.begin(len(prompt))
    steps = list(engine.generate(prompt, GREEDY, max_tokens=count))
    return prompt + [step.token_id for step in steps if step.token_id is not None][:-1]


def test_every_token_once_with_the_experts_of_the_reference(
    engine: Engine, packed: Packed, checkpoint: Packed
) -> None:
    from transformers import AutoModelForCausalLM

    recorder = TraceRecorder("tiny", engine.config, weights=True, hidden_rank=128)
    engine.record(recorder)
    prompts = [LONG, LONG[:20], [7]]  # the second would be held already; the third is one token
    texts = [answer(engine, recorder, prompt, 6) for prompt in prompts]
    trace = recorder.trace()
    assert trace.token_ids is not None and trace.weights is not None
    assert trace.hidden is not None and trace.projection is not None
    assert trace.token_ids.tolist() == [token for text in texts for token in text]
    assert np.bincount(trace.sequence).tolist() == [len(text) for text in texts]
    for n, prompt in enumerate(prompts):
        phase = trace.phase[trace.sequence == n]
        assert phase.tolist() == [0] * len(prompt) + [1] * 5

    reference = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_moe"), dtype=torch.float32)
    for n, text in enumerate(texts):
        with torch.inference_mode():
            out = reference.model(torch.tensor([text]), output_router_logits=True)
        part = trace.select(trace.sequence == n)
        for layer, logits in enumerate(out.router_logits):
            chances, ids = logits.float().softmax(1).topk(trace.top_k)
            assert np.array_equal(part.experts[:, layer], ids.numpy())
            expected = chances / chances.sum(1, keepdim=True)
            assert part.weights is not None
            np.testing.assert_allclose(part.weights[:, layer], expected, atol=1e-3)
        assert part.hidden is not None
        # with as many dimensions as the hidden state the projection is a rotation: undo it
        restored = part.hidden.astype(np.float32) @ trace.projection.T
        np.testing.assert_allclose(restored, out.last_hidden_state[0], atol=0.02)
    assert np.unique(trace.experts).size == engine.config.num_experts


def test_a_forward_that_is_broken_off_leaves_no_trace(engine: Engine) -> None:
    recorder = TraceRecorder("tiny", engine.config)
    engine.record(recorder)
    expected = answer(engine, recorder, LONG[:9], 4)
    asked = iter(range(100))
    engine.reset_kv()
    recorder.begin(9)
    [step] = engine.generate(LONG[:9], GREEDY, interrupted=lambda: next(asked) == 2)
    assert step.finish_reason == "interrupted" and recorder.num_tokens == 12
    again = answer(engine, recorder, LONG[:9], 4)
    trace = recorder.trace()
    assert trace.token_ids is not None
    assert trace.token_ids.tolist() == [*expected, *again]
    assert np.array_equal(trace.experts[:12], trace.experts[12:])
    engine.record(None)
    list(engine.generate(LONG[:9], GREEDY, max_tokens=3))
    assert recorder.num_tokens == 24


def test_the_same_file_at_every_pool_size(packed: Packed, tmp_path: Path) -> None:
    files = []
    for pool in ("2slots", "all"):
        engine = Engine.open(packed("olmoe"), EngineOptions(PoolSize.parse(pool), "cpu", "float32"))
        recorder = TraceRecorder("tiny", engine.config, hidden_rank=3, weights=True)
        engine.record(recorder)
        answer(engine, recorder, LONG[:30], 8)
        recorder.trace().save(tmp_path / pool)
        files.append((tmp_path / pool).read_bytes())
        engine.close()
    assert files[0] == files[1]
    assert len(Trace.load(tmp_path / "all")) == 37


def test_projection_is_orthonormal() -> None:
    columns = projection(96, 7)
    np.testing.assert_allclose(columns.T @ columns, np.eye(7), atol=1e-6)
    assert np.array_equal(columns, projection(96, 7))
    assert not np.array_equal(columns, projection(96, 7, seed=1))


def test_many_experts_have_two_bytes(engine: Engine) -> None:
    config = dataclasses.replace(engine.config, num_experts=300, num_hidden_layers=1)
    recorder = TraceRecorder("wide", config)
    recorder.begin(1)
    recorder.routed(0, torch.tensor([[299, 4]], dtype=torch.int32), torch.zeros(1, 2))
    recorder.evaluated([3], torch.zeros(1, 128))
    assert recorder.trace().experts.tolist() == [[[299, 4]]]
