"""The memory plan: what --pool means, and refusals with numbers."""

from __future__ import annotations

import pytest

from seqmoe_cli.engine.memory import plan_memory
from seqmoe_cli.errors import ResourceError, UsageError
from seqmoe_cli.settings import EngineOptions, PoolSize
from seqmoe_weights.packed import PackedModel
from tests.checkpoints import packed_model


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    return PackedModel.open(packed_model(tmp_path_factory.mktemp("plan") / "model", "qwen3_moe"))


def num_slots(packed: PackedModel, pool: str) -> int:
    return plan_memory(packed, EngineOptions(PoolSize.parse(pool), "cpu")).num_slots


def test_pool_sizes(packed: PackedModel) -> None:
    total, record = packed.config.num_routed_experts, packed.layouts[0].record_bytes
    assert total == 24
    assert num_slots(packed, "all") == num_slots(packed, "auto") == total
    assert num_slots(packed, "45%") == 10
    assert num_slots(packed, "100%") == total
    assert num_slots(packed, "2slots") == 2
    assert num_slots(packed, "5000slots") == total
    assert num_slots(packed, f"{5 * record // 1024 + 1}KiB") == 5


@pytest.mark.parametrize("pool", ["1slots", "4%", "1KiB"])
def test_less_than_one_layer_needs_is_refused_with_numbers(packed: PackedModel, pool: str) -> None:
    with pytest.raises(ResourceError, match=r"--pool .* holds \d experts; one layer needs 2") as e:
        num_slots(packed, pool)
    assert "--pool 2slots" in e.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0%",
        "101%",
        "-3%",
        "0slots",
        "1.5slots",
        "3",
        "nan%",
        "0GiB",
        "2TiB",
        "99999999999slots",
        "9999999999GiB",
        "٤slots",
        "1e3slots",
    ],
)
def test_nonsense_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--pool"):
        PoolSize.parse(text)


def test_budget_is_divided_and_refused_with_numbers(packed: PackedModel) -> None:
    options = EngineOptions(PoolSize("auto"), "cpu", ctx_size=1024, vram_gib=0.25)
    plan = plan_memory(packed, options)
    assert plan.budget_bytes == 2**28
    used = plan.resident_bytes + plan.kv_bytes + plan.workspace_bytes + plan.pool_bytes
    assert used <= plan.budget_bytes
    with pytest.raises(ResourceError, match=r"(MiB|GiB)") as e:
        plan_memory(packed, EngineOptions(PoolSize("auto"), "cpu", vram_gib=0.001))
    assert "--vram" in e.value.hint
    with pytest.raises(ResourceError, match=r"pool .* exceed the budget"):
        plan_memory(packed, EngineOptions(PoolSize("all"), "cpu", vram_gib=0.001))


def test_context_is_cut_to_the_model_and_said(packed: PackedModel) -> None:
    longest = packed.config.max_position_embeddings
    plan = plan_memory(packed, EngineOptions(device="cpu", ctx_size=longest + 1))
    assert plan.ctx_size == longest
    assert any(str(longest) in line for line in plan.fallbacks)
    assert plan_memory(packed, EngineOptions(device="cpu", ctx_size=64)).fallbacks == ()


def test_a_carrier_of_nothing_is_said(packed: PackedModel) -> None:
    """On a CPU `--prefetch auto` is off."""
    options = EngineOptions(PoolSize.parse("45%"), "cpu", prefetch_by="thread")
    (line,) = plan_memory(packed, options).fallbacks
    assert "--prefetch-by thread does nothing" in line
