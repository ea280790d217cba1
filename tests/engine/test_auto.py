"""What policy and prefetch "auto" stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.memory import plan_memory, resolve_auto
from seqmoe_cli.forecast.predictor import Predictor, PredictorShape
from seqmoe_cli.forecast.stored import StoredPredictor
from seqmoe_cli.settings import EngineOptions, PoolSize
from seqmoe_weights.packed import PackedModel
from tests.checkpoints import packed_model


@pytest.mark.parametrize(
    ("device", "has_predictor", "given", "chosen"),
    [
        ("cpu", True, {}, ("lru", "off")),
        ("cuda", False, {}, ("decayed", "lookahead")),
        ("cuda", True, {}, ("forecast", "full")),
        ("cuda", True, {"policy": "decayed"}, ("decayed", "full")),
        ("cuda", True, {"policy": "lru"}, ("lru", "lookahead")),
        ("cuda", True, {"prefetch": "off"}, ("forecast", "off")),
        ("cuda", False, {"policy": "lru", "prefetch": "off"}, ("lru", "off")),
        ("cpu", False, {"prefetch": "full"}, ("decayed", "full")),
        ("cpu", False, {"policy": "forecast"}, ("forecast", "off")),
    ],
)
def test_what_is_not_given_is_the_fastest_measured(
    device: str, has_predictor: bool, given: dict[str, str], chosen: tuple[str, str]
) -> None:
    options = EngineOptions(**given)  # type: ignore[arg-type]
    assert resolve_auto(options, torch.device(device), has_predictor) == chosen


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_model(tmp_path_factory.mktemp("auto") / "model", "qwen3_moe", num_experts=12)


def test_a_cpu_decides_nothing(packed: Path) -> None:
    options = EngineOptions(PoolSize.parse("45%"), "cpu")
    plan = plan_memory(PackedModel.open(packed), options, has_predictor=True)
    assert (plan.policy, plan.prefetch, plan.forecasts) == ("lru", "off", False)


def chosen(packed: Path, pool: str) -> tuple[str, str, list[str]]:
    engine = Engine.open(packed, EngineOptions(PoolSize.parse(pool), "cuda", "float32", 100))
    found = engine.plan.policy, engine.plan.prefetch, engine.fallbacks
    engine.close()
    return found


@pytest.mark.gpu
def test_on_a_gpu_by_the_pool_and_the_predictor(packed: Path) -> None:
    assert chosen(packed, "45%") == ("decayed", "lookahead", [])
    assert chosen(packed, "all") == ("lru", "off", [])
    assert chosen(packed, "3slots") == ("decayed", "off", [])  # too few for copies ahead
    config = PackedModel.open(packed).config
    sizes = (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)
    shape = PredictorShape(*sizes, config.vocab_size, token_rank=4, width=16)
    StoredPredictor(Predictor(shape), {}).attach(packed)
    assert chosen(packed, "45%") == ("forecast", "full", [])
    StoredPredictor(Predictor(shape), {"weights_sha256": "of another model"}).attach(packed)
    policy, prefetch, fallbacks = chosen(packed, "45%")
    assert (policy, prefetch) == ("decayed", "lookahead")
    assert fallbacks[0].startswith("the model's predictor is not used: the predictor was trained")
