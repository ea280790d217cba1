"""The bits of the output do not depend on what is resident."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_kernels.state import MISSES
from tests.checkpoints import packed_model

POOLS = ["2slots", "3slots", "25%", "45%", "all"]


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_model(
        tmp_path_factory.mktemp("exact") / "model", "qwen3_moe", fp8=request.param == "fp8"
    )


def device_params() -> list[object]:
    return ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_at_every_pool_size(packed: Path, device: str, dtype: str) -> None:
    """Log-likelihoods, sampled text and its continuation over reused KV state are equal."""
    seen: list[tuple[torch.Tensor, list[int | None]]] = []
    misses = []
    for pool in POOLS:
        engine = Engine.open(packed, EngineOptions(PoolSize.parse(pool), device, dtype))
        ids = torch.randint(
            0, engine.config.vocab_size, (600,), generator=torch.manual_seed(2)
        ).tolist()
        likelihoods = engine.log_likelihoods(ids)
        sampling = SamplingParams(seed=11, temperature=1.0)
        text: list[int | None] = []
        before = engine.pool.counters()[MISSES]
        for prompt in (ids[:30], [*ids[:30], 5, 6, 7]):
            text += [s.token_id for s in engine.generate(prompt, sampling, max_tokens=20)]
        misses.append(engine.pool.counters()[MISSES] - before)
        seen.append((likelihoods, text))
        engine.close()
    assert misses == sorted(misses, reverse=True)
    assert misses[0] > misses[-1] == 0
    for likelihoods, text in seen[1:]:
        assert torch.equal(likelihoods, seen[0][0])
        assert text == seen[0][1]


@pytest.mark.parametrize("device", device_params())
def test_slots_hold_what_they_say(packed: Path, device: str) -> None:
    """After many evictions every slot's stamp and bytes are those of its owner."""
    engine = Engine.open(packed, EngineOptions(PoolSize.parse("5slots"), device, "float32"))
    for _ in engine.generate([1, 2, 3], SamplingParams(temperature=0), max_tokens=30):
        pass
    stamp = engine.model.layouts[0]["stamp"].offset
    slots = engine.pool.slots.cpu()
    owners = engine.pool.state.owner.tolist()
    assert min(owners) >= 0
    for slot, owner in enumerate(owners):
        assert slots[slot, stamp : stamp + 8].view(torch.int64).item() == owner
        assert torch.equal(slots[slot], engine.store.records[owner])
        assert engine.pool.state.slot_of[owner] == slot
    engine.close()


@pytest.mark.gpu
def test_a_gpu_says_what_the_cpu_says(packed: Path) -> None:
    """Greedy text in float32, operation by operation and as one graph, whatever is resident."""
    texts = []
    for device, eager, pool, verify in (
        ("cpu", True, "all", False),
        ("cuda", True, "2slots", False),
        ("cuda", True, "all", False),
        ("cuda", False, "2slots", True),
        ("cuda", False, "45%", False),
        ("cuda", False, "all", False),
    ):
        options = EngineOptions(PoolSize.parse(pool), device, "float32", verify=verify)
        engine = Engine.open(packed, options, eager=eager)
        steps = engine.generate(list(range(10, 40)), SamplingParams(temperature=0), max_tokens=60)
        texts.append([step.token_id for step in steps])
        engine.close()
    assert all(text == texts[0] for text in texts)
