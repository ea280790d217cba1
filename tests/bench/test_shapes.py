"""Models of random weights: sizes of the real ones, finite and distinct records, routing with a
choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from seqmoe_cli.bench.inventory import count_params
from seqmoe_cli.bench.random_weights import random_store, random_tensors
from seqmoe_cli.bench.shapes import SHAPES, Shape, find_shape
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.memory import plan_memory
from seqmoe_cli.errors import UsageError
from seqmoe_cli.forecast.recorder import TraceRecorder
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_weights.families import find_family

TINY = find_shape("tiny")
SMALL = [TINY, Shape("tiny-fp8", replace(TINY.config, dense_format="FP8"))]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "experts", "record_bytes", "billions"),
    [
        ("qwen3-30b-a3b-fp8", 6144, 4_722_688, 30.5),
        ("qwen3-30b-a3b", 6144, 9_441_280, 30.5),
        ("mixtral-8x7b", 256, 352_325_632, 46.7),
    ],
)
def test_sizes_of_the_real_models(
    name: str, experts: int, record_bytes: int, billions: float
) -> None:
    shape = find_shape(name)
    assert shape.config.num_routed_experts == experts
    assert shape.layouts[0].record_bytes == record_bytes
    assert count_params(shape.config).total / 1e9 == pytest.approx(billions, abs=0.05)
    bytes_per_param = 1 if name.endswith("fp8") else 2
    assert shape.num_bytes / count_params(shape.config).total == pytest.approx(
        bytes_per_param, rel=0.03
    )


def test_an_unknown_shape() -> None:
    with pytest.raises(UsageError, match="--shape 'qwen9'") as caught:
        find_shape("qwen9")
    assert all(name in caught.value.hint for name in SHAPES)


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_records_are_finite_distinct_and_stamped(shape: Shape) -> None:
    reports: list[tuple[int, int]] = []
    store = random_store(shape, pin=False, progress=lambda *done: reports.append(done))
    records, layout = store.records.numpy(), shape.layouts[0]
    assert records.shape == (shape.config.num_routed_experts, layout.record_bytes)
    assert reports[-1] == (records.nbytes, records.nbytes)
    stamp = layout["stamp"].offset
    assert records[:, stamp : stamp + 8].copy().view(np.int64)[:, 0].tolist() == [
        *range(len(records))
    ]
    for part in ("gate", "up", "down"):
        at = layout[part]
        content = records[:, at.offset : at.offset + at.num_bytes]
        assert len({row.tobytes() for row in content}) == len(content)
        if at.dtype == "F8_E4M3":
            assert not ((content & 0x7F) == 0x7F).any()  # NaN
        else:
            values = torch.from_numpy(content[:16].copy()).view(torch.bfloat16).float()
            assert bool(values.isfinite().all()) and values.std() > 0
    gate, up = (records[0, layout[n].offset :][: layout[n].num_bytes] for n in ("gate", "up"))
    assert not np.array_equal(gate, up)


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_resident_tensors_are_those_of_the_family(shape: Shape) -> None:
    weights = random_tensors(shape, torch.bfloat16, CPU)
    specs = find_family(shape.config.family).resident_tensors(shape.config)
    for spec in specs:
        tensor = weights.pop(spec.name)
        assert tensor.shape == spec.shape
        if spec.quantized and shape.config.dense_format == "FP8":
            assert tensor.dtype == torch.float8_e4m3fn
            assert weights.pop(f"{spec.name}_scale_inv").dtype == torch.float32
        else:
            assert tensor.dtype == torch.bfloat16
        assert bool(tensor.float().isfinite().all())
    assert not weights


def test_the_router_has_a_choice() -> None:
    """Tokens differ in their experts, and most experts are used."""
    shape, num_tokens = TINY, 40
    plan = plan_memory(shape, EngineOptions(PoolSize.parse("all"), "cpu", "float32", 256))
    store = random_store(shape, pin=False)
    engine = Engine(shape, store, plan, random_tensors(shape, plan.dtype, CPU))
    recorder = TraceRecorder(shape.name, shape.config)
    recorder.begin(num_tokens)
    engine.record(recorder)
    ids = torch.randint(2048, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    list(engine.generate(ids, SamplingParams(seed=0), max_tokens=1))
    engine.close()
    trace = recorder.trace()
    layers = range(trace.num_layers)
    used = [len(np.unique(trace.experts[:, layer])) for layer in layers]
    assert min(used) > 0.7 * shape.config.num_experts
    before, after = trace.experts[:-1, :, :, None], trace.experts[1:, :, None]
    shared = (before == after).any(3).mean()
    assert shared < 0.5, "neighbours use the same experts"
