"""The stream of steps: KV reuse, ends, interruption, statistics."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqmoe_cli.engine.decoding import EagerSteps
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.memory import PREFILL_CHUNK
from seqmoe_cli.engine.stats import TurnStats
from seqmoe_cli.errors import PromptError
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_kernels.state import MISSES
from tests.checkpoints import packed_model

GREEDY = SamplingParams(temperature=0)
PROMPT = list(range(10, 40))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_model(tmp_path_factory.mktemp("engine") / "model", "qwen3_moe")


@pytest.fixture(params=["cpu", "ahead", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(packed: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """On a CPU with each step when it is asked for, then with steps that run ahead of the host."""
    device = "cuda" if request.param == "cuda" else "cpu"
    engine = Engine.open(
        packed,
        EngineOptions(PoolSize.parse("45%"), device, "float32", 600, policy="lru", prefetch="off"),
    )
    if request.param == "ahead":
        assert isinstance(engine.decoding.issue, EagerSteps)
        engine.decoding.issue.ahead = 1
    yield engine
    engine.close()


def test_counts_and_rates_add_up(engine: Engine) -> None:
    turn = TurnStats(prompt_tokens=len(PROMPT))
    for step in engine.generate(PROMPT, GREEDY, max_tokens=6):
        turn.add(step)
    layers, top_k = engine.config.num_hidden_layers, engine.config.num_experts_per_tok
    assert turn.finish_reason == "length"
    assert turn.completion_tokens == 6
    assert turn.prefill.num_tokens == len(PROMPT)
    assert turn.decode.num_tokens == 5  # the first token came out of the prefill
    assert turn.decode.hits + turn.decode.misses == 5 * layers * top_k
    total = turn.total
    assert total.fetched_bytes == total.misses * engine.plan.record_bytes
    assert total.misses == engine.pool.counters()[MISSES]
    assert turn.prefill.misses >= layers * top_k  # cold: first uses are misses
    assert total.hit_rate == total.hits / (total.hits + total.misses)


def test_stop_token_ends_the_answer_and_is_not_delivered(engine: Engine) -> None:
    plain = [s.token_id for s in engine.generate(PROMPT, GREEDY, max_tokens=8)]
    first = plain.index(plain[4])
    steps = list(engine.generate(PROMPT, GREEDY, max_tokens=8, stop_ids={plain[4]}))
    assert [s.token_id for s in steps] == [*plain[:first], None]
    assert [s.finish_reason for s in steps] == [None] * first + ["stop"]


def test_common_prefix_is_not_evaluated_again(engine: Engine) -> None:
    answer = [s.token_id for s in engine.generate(PROMPT, GREEDY, max_tokens=5)]
    longer = [*PROMPT, *(t for t in answer if t is not None), 50, 51]
    step = next(engine.generate(longer, GREEDY, max_tokens=1))
    assert step.stats.num_tokens == 3  # the answer's last token and two new ones
    forked = [*PROMPT[:12], 99, 98]
    step = next(engine.generate(forked, GREEDY, max_tokens=1))
    assert step.stats.num_tokens == 2
    assert engine.token_ids == forked
    fresh = next(engine.generate(PROMPT, GREEDY, max_tokens=1))
    assert fresh.stats.num_tokens == len(PROMPT) - 12


def test_interruption_leaves_a_consistent_state(engine: Engine) -> None:
    expected = [s.token_id for s in engine.generate(PROMPT, GREEDY, max_tokens=12)]
    for after in (0, 1, 2, 4, 7):  # in the prefill, then between steps
        engine.reset_kv()
        polls = itertools.count()
        steps = list(
            engine.generate(
                PROMPT, GREEDY, max_tokens=12, interrupted=lambda p=polls, a=after: next(p) >= a
            )
        )
        assert steps[-1].finish_reason == "interrupted"
        assert steps[-1].token_id is None
        full = [*PROMPT, *(s.token_id for s in steps if s.token_id is not None)]
        assert engine.token_ids == full[: len(engine.token_ids)]
        again = [s.token_id for s in engine.generate(PROMPT, GREEDY, max_tokens=12)]
        assert again == expected


def test_closing_the_stream_early_keeps_the_state(engine: Engine) -> None:
    stream = engine.generate(PROMPT, GREEDY, max_tokens=12)
    first = [next(stream).token_id for _ in range(4)]
    stream.close()
    assert engine.token_ids == [*PROMPT, *first[:3]]
    again = [s.token_id for s in engine.generate(PROMPT, GREEDY, max_tokens=4)]
    assert again == first


def test_context_end(engine: Engine) -> None:
    ids = [i % 200 for i in range(590)]
    steps = list(engine.generate(ids, GREEDY))
    assert steps[-1].finish_reason == "length"
    assert len(engine.token_ids) == 600
    assert len(steps) == 11
    with pytest.raises(PromptError, match=r"600 tokens.*600"):
        next(engine.generate([1] * 600, GREEDY))
    with pytest.raises(PromptError, match="no tokens"):
        next(engine.generate([], GREEDY))
    with pytest.raises(PromptError, match="vocabulary"):
        next(engine.generate([10**6], GREEDY))


def test_prefill_progress_grows_to_the_end(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    ids = [i % 200 for i in range(520)]
    next(engine.generate(ids, GREEDY, on_prefill=lambda done, total: seen.append((done, total))))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (520, 520)
    num_chunks = -(-len(ids) // PREFILL_CHUNK[engine.device.type])
    assert len(seen) == num_chunks * engine.config.num_hidden_layers


def test_reset_pool_makes_it_cold(engine: Engine) -> None:
    text = [s.token_id for s in engine.generate(PROMPT, GREEDY, max_tokens=8)]
    engine.reset_pool()
    engine.reset_kv()
    turn = TurnStats()
    for step in engine.generate(PROMPT, GREEDY, max_tokens=8):
        turn.add(step)
        text.pop(0) if step.token_id == text[0] else pytest.fail("another text")
    assert turn.prefill.hits < turn.prefill.misses
