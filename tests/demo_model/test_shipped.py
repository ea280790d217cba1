"""The shipped sparse model: the delta of the repository on the packaged weights, converted and run.

Most tests run its first layers only, whose experts are chosen as in the whole model.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.stats import TurnStats
from seqmoe_cli.forecast.recorder import TraceRecorder
from seqmoe_cli.forecast.trace import Trace
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_cli.text.tokenizer import Tokenizer
from seqmoe_weights.convert import convert

pytest.importorskip("gguf")

from safetensors.torch import load_file

from tools.demo_model.answers import POOL, PROMPTS
from tools.demo_model.checkpoint import write_checkpoint
from tools.demo_model.source import DenseModel, packaged_gguf, read_gguf
from tools.demo_model.sparse.build import (
    DELTA,
    HEALING,
    TOP_K,
    shipped_delta,
    sparse_config,
    sparse_tensors,
)
from tools.demo_model.sparse.delta import is_healed, read_delta, round_delta

Run = tuple[list[int], TurnStats, Trace]
NUM_LAYERS = 4
NUM_EXPERTS = 16
TEXT = "\n".join(turn for turns in json.loads(PROMPTS.read_text("utf-8")) for turn in turns)


@pytest.fixture(scope="module")
def dense() -> DenseModel:
    try:
        return read_gguf(packaged_gguf())
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def delta() -> dict[str, Tensor]:
    return shipped_delta()


@pytest.fixture(scope="module")
def cut(
    dense: DenseModel, delta: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The first layers of the sparse model, converted."""
    first = {k: t if k == "final_norm" else t[:NUM_LAYERS].contiguous() for k, t in delta.items()}
    config = sparse_config(dense.config, first, TOP_K) | {"num_hidden_layers": NUM_LAYERS}
    folder = tmp_path_factory.mktemp("sparse")
    tensors = sparse_tensors(dense.tensors, first)
    write_checkpoint(folder / "checkpoint", config, tensors, dense.tokenizer)
    convert(folder / "checkpoint", folder / "packed", "keep", False)
    return folder / "packed"


def run(model: Path, pool: str) -> Run:
    """Greedy tokens behind TEXT, which goes through a cold pool, and what was routed."""
    engine = Engine.open(model, EngineOptions(PoolSize.parse(pool), "cpu", "float32", 1024))
    recorder = TraceRecorder("cut", engine.config)
    ids = Tokenizer.open(model).encode(TEXT)
    engine.record(recorder)
    recorder.begin(len(ids))
    tokens, stats = [], TurnStats(prompt_tokens=len(ids))
    for step in engine.generate(ids, SamplingParams(temperature=0), max_tokens=24, stop_ids=()):
        stats.add(step)
        if step.token_id is not None:
            tokens.append(step.token_id)
    engine.close()
    return tokens, stats, recorder.trace()


@pytest.fixture(scope="module")
def everything(cut: Path) -> Run:
    return run(cut, "all")


def test_delta_fits_the_dense_model(dense: DenseModel, delta: dict[str, Tensor]) -> None:
    num_layers, width = dense.config["num_hidden_layers"], dense.config["intermediate_size"]
    neurons = delta["neurons"].long()
    assert neurons.shape[:2] == (num_layers, NUM_EXPERTS)
    assert bool((neurons.diff(dim=-1) > 0).all())  # each one once, in order
    assert int(neurons.min()) >= 0 and int(neurons.max()) < width
    again = round_delta(*read_delta(delta, width))
    assert again.keys() == delta.keys()
    for name, tensor in delta.items():
        assert bool(tensor.float().isfinite().all()), name
        torch.testing.assert_close(again[name], tensor, rtol=1e-6, atol=0, msg=name)
    assert DELTA.stat().st_size + HEALING.stat().st_size < 40_000_000


def test_healing_takes_the_place_of_its_part_of_the_delta(delta: dict[str, Tensor]) -> None:
    first, healing = load_file(DELTA), load_file(HEALING)
    assert healing.keys() == {name for name in first if is_healed(name)}
    assert delta.keys() == first.keys()
    for name, tensor in delta.items():
        assert torch.equal(tensor, (healing if is_healed(name) else first)[name]), name
        if name in healing and not name.endswith(".step"):
            assert healing[name].shape != first[name].shape or not torch.equal(tensor, first[name])


def test_pool_changes_no_text(cut: Path, everything: Run) -> None:
    tokens, stats, _ = run(cut, POOL)
    assert tokens == everything[0]
    assert len(tokens) == 24
    assert stats.total.misses > 0
    assert 0 < stats.decode.hit_rate < 1


def test_every_expert_is_used(everything: Run) -> None:
    trace = everything[2]
    for layer in range(NUM_LAYERS):
        load = np.bincount(trace.experts[:, layer].ravel(), minlength=NUM_EXPERTS)
        assert (load > 0).sum() >= NUM_EXPERTS - 2
        assert load.max() < 4 * load.mean()


def test_experts_are_chosen_by_the_token(everything: Run) -> None:
    trace = everything[2]
    assert trace.token_ids is not None
    same = trace.token_ids[:, None] == trace.token_ids
    np.fill_diagonal(same, False)
    first = trace.experts[:, 0, 0]  # the likeliest of the first layer
    agree = first[:, None] == first
    assert agree[same].mean() > 0.8
    assert agree[~same].mean() < 0.2
