"""Fault injection: with `verify`, a slot that holds another expert than the one asked for is seen
before a token comes of it, and the program ends with its name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from seqmoe_cli.bench import perplexity
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.stats import TurnStats
from seqmoe_cli.errors import PoolError, UnsupportedError
from seqmoe_cli.residency.pool import ExpertPool, Stamps
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_kernels.pool.verify import MAX_VERIFIED_EXPERTS
from tests.checkpoints import packed_model

GREEDY = SamplingParams(temperature=0)
PROMPT = [i * 7 % 200 for i in range(40)]
LENGTH = 24
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_model(tmp_path_factory.mktemp("verify") / "model", "qwen3_moe")


def open_engine(packed: Path, device: str, pool: str = "all", verify: bool = True) -> Engine:
    options = EngineOptions(PoolSize.parse(pool), device, "float32", ctx_size=200, verify=verify)
    return Engine.open(packed, options)


def name(engine: Engine, flat_id: int) -> str:
    layer, expert = divmod(flat_id, engine.config.num_experts)
    return f"layer {layer}, expert {expert}"


class Target(NamedTuple):
    """`expert` is read, and `other` is not, by both steps after the first `after` tokens of the
    answer (one of the steps may be under way already); flat ids."""

    after: int
    expert: int
    other: int


def find_target(packed: Path) -> Target:
    """The routing of every step, from an answer of the CPU."""
    engine = open_engine(packed, "cpu", verify=False)
    used: list[set[int]] = [set()]

    def note(layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        used[-1] |= {layer * engine.config.num_experts + int(i) for i in ids.flatten()}

    engine._context.observer = note
    for _ in engine.generate(PROMPT, GREEDY, max_tokens=LENGTH):
        used.append(set())
    engine.close()
    after = next(n for n in range(5, LENGTH - 2) if used[n] & used[n + 1])
    either = used[after] | used[after + 1]
    other = max(set(range(engine.config.num_routed_experts)) - either)
    return Target(after, min(used[after] & used[after + 1]), other)


def overwrite_stamp(engine: Engine, expert: int, other: int) -> str:
    slot = int(engine.pool.state.slot_of[expert])
    at = engine.model.layouts[0]["stamp"].offset
    engine.pool.slots[slot, at : at + 8].view(torch.int64).fill_(-7)
    return "something else"


def swap_slots(engine: Engine, expert: int, other: int) -> str:
    pair = engine.pool.state.slot_of[[expert, other]].long()
    assert int(pair.min()) >= 0
    engine.pool.slots[pair] = engine.pool.slots[pair.flip(0)]
    return name(engine, other)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("inject", [overwrite_stamp, swap_slots])
def test_a_fault_is_caught_within_two_tokens(
    packed: Path, device: str, inject: Callable[[Engine, int, int], str]
) -> None:
    after, expert, other = find_target(packed)
    engine = open_engine(packed, device)
    expected = [s.token_id for s in engine.generate(PROMPT, GREEDY, max_tokens=LENGTH)]
    engine.reset_kv()
    stream = engine.generate(PROMPT, GREEDY, max_tokens=LENGTH)
    assert [next(stream).token_id for _ in range(after)] == expected[:after]
    slot = int(engine.pool.state.slot_of[expert])
    found = inject(engine, expert, other)
    given: list[int | None] = []
    with pytest.raises(PoolError) as caught:
        for step in itertools.islice(stream, 2):
            given.append(step.token_id)
    assert given == expected[after : after + len(given)]  # at most one, queued before
    message = f"slot {slot} should hold {name(engine, expert)}, but holds {found}"
    assert caught.value.message == message
    assert caught.value.hint
    held = [*PROMPT, *(t for t in expected if t is not None)]
    assert engine.token_ids == held[: len(engine.token_ids)]
    with pytest.raises(PoolError, match=re.escape(message)):  # and it stays that way
        next(engine.generate(PROMPT[:3], GREEDY, max_tokens=1))
    engine.close()


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_damaged_record_of_the_store_is_caught_when_it_is_fetched(
    packed: Path, device: str
) -> None:
    """In the prefill, which reads many slots at once, and in windows of perplexity."""
    at = EngineOptions(PoolSize.parse("5slots"), device, "float32", ctx_size=200, verify=True)
    engine = Engine.open(packed, at)
    offset = engine.model.layouts[0]["stamp"].offset
    for record in engine.store.records[-engine.config.num_experts :]:  # the last layer
        record[offset : offset + 8].view(torch.int64).fill_(3)
    with pytest.raises(
        PoolError, match=r"^slot \d should hold layer 2, expert \d, but holds layer"
    ):
        next(engine.generate(PROMPT, GREEDY))
    assert engine.token_ids == PROMPT  # evaluated, but nothing was said after it
    engine.close()
    engine = Engine.open(packed, at)
    engine.store.records[:, offset] = 3
    with pytest.raises(PoolError, match="should hold layer 0, expert"):
        engine.log_likelihoods(PROMPT)
    with pytest.raises(PoolError):
        perplexity.score(engine, PROMPT, lambda done, total: None)
    engine.close()


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_an_intact_pool_gives_the_same_text_in_silence(packed: Path, device: str) -> None:
    answers = []
    for verify in (False, True):
        engine = open_engine(packed, device, "3slots", verify)
        turn, text = TurnStats(), []
        for step in engine.generate(PROMPT, GREEDY, max_tokens=100):
            turn.add(step)
            text.append(step.token_id)
        assert turn.decode.misses > 300
        answers.append((text, turn.total.hits, turn.total.misses))
        engine.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_without_verify_nothing_is_looked_at(packed: Path, device: str) -> None:
    engine = open_engine(packed, device, "6slots", verify=False)
    text = [s.token_id for s in engine.generate(PROMPT, GREEDY, max_tokens=LENGTH)]
    at = engine.model.layouts[0]["stamp"].offset
    engine.store.records[:, at : at + 8] = 255
    engine.reset_pool()
    engine.reset_kv()
    again = [s.token_id for s in engine.generate(PROMPT, GREEDY, max_tokens=LENGTH)]
    assert again == text  # stamps are no weights
    engine.close()


def test_ids_that_a_fault_cannot_name_are_refused() -> None:
    records = torch.zeros(MAX_VERIFIED_EXPERTS + 1, 8, dtype=torch.uint8)
    cpu = torch.device("cpu")
    with pytest.raises(UnsupportedError, match="65,536 experts"):
        ExpertPool(2, records, cpu, Stamps(0, 8))
    ExpertPool(2, records[1:], cpu, Stamps(0, 8))
    ExpertPool(2, records, cpu)
