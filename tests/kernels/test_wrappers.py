"""What the Triton wrappers refuse, and that the message holds the offending value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from seqmoe_kernels import Matrix, Norm, Resolved, Routing, expert_format, expert_pairs
from seqmoe_kernels.attention.decode import attention_step
from seqmoe_kernels.attention.rope import Rotation, rotary
from seqmoe_kernels.dense.linear import linears
from seqmoe_kernels.dense.norm import rms_norm
from seqmoe_kernels.experts.combine import combine
from seqmoe_kernels.experts.mlp import expert_mlp
from seqmoe_kernels.formats.fp8_block import FP8
from seqmoe_kernels.pool.choose import RecordedIds, choose
from seqmoe_kernels.pool.fetch import fetch
from seqmoe_kernels.pool.resolve import MAX_SLOTS, PoolState, resolve
from seqmoe_kernels.pool.route import route
from seqmoe_kernels.sampling.sample import sample
from seqmoe_kernels.sampling.state import SamplingState
from seqmoe_kernels.state import NUM_MARKS
from seqmoe_weights.layout import RecordLayout

FMT = expert_format(RecordLayout.for_experts(64, 32, "BF16"))
SHIFTED = FMT._replace(up=FMT.up._replace(offsets=(4104,)))
NARROW = expert_format(RecordLayout.for_experts(64, 24, "BF16"))._replace(
    record_bytes=FMT.record_bytes
)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pool(num_slots: int) -> PoolState:
    return PoolState.cold(num_slots, num_slots, torch.device("cpu"))


def step(**changed: object) -> Callable[[], object]:
    """An attention step of 4 query heads and 2 KV heads of 32, but for what is `changed`."""
    row, state = torch.zeros(1, 128), torch.zeros(8, 2, 32)
    good = {"q": row, "k": row[:, :64], "v": row[:, 64:], "keys": state, "values": state}
    good |= {"position": torch.zeros(1).long(), "scale": 1.0}
    good["rotation"] = Rotation(torch.zeros(16), row[0, :32], row[0, :64], 1e-6)
    return lambda: attention_step.launch(**(good | changed))


def sampling(logits: torch.Tensor, **changed: torch.Tensor) -> Callable[[], object]:
    """Sampling from a vocabulary of 8 tokens, but for what is `changed`."""
    counts = torch.zeros(8)
    state = SamplingState(torch.zeros(7), torch.zeros(2).long(), counts, counts.bool())
    return lambda: sample.launch(logits, state._replace(**changed))


def refusals() -> list[tuple[str, Callable[[], object]]]:
    """(what the message must contain, a call)."""
    square = torch.zeros(32, 32)
    fp8, matrix = square.to(torch.float8_e4m3fn), Matrix.of(square)
    slots = torch.zeros(2, FMT.record_bytes, dtype=torch.uint8)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    found = Resolved(ints(0), ints(-1), ints(-1), ints(0))
    uneven = found._replace(miss_slots=ints(0, 1))
    out, one = torch.zeros(1, 1, 64), torch.ones(1)
    short = RecordedIds(ints(0).view(1, 1, 1), torch.zeros(1).long())
    kv = torch.zeros(8, 2, 32)
    records = torch.zeros(3, 40, dtype=torch.uint8)
    marks = torch.zeros(NUM_MARKS, dtype=torch.int64)
    return [
        ("torch.int64", sampling(torch.zeros(8).long())),
        ("[1, 8]", sampling(torch.zeros(1, 8))),
        ("empty", sampling(torch.zeros(0))),
        ("[9]", sampling(torch.zeros(9))),
        ("[6]", sampling(torch.zeros(8), settings=torch.zeros(6))),
        ("torch.uint8", sampling(torch.zeros(8), seen=torch.zeros(8).byte())),
        ("torch.float64", lambda: rms_norm.launch(square.double(), square[0].double(), 1e-6)),
        ("[31]", lambda: rms_norm.launch(square, torch.zeros(31), 1e-6)),
        ("(1, 32)", lambda: rms_norm.launch(square.t(), square[0], 1e-6)),
        ("torch.int32", lambda: rotary.launch(kv, torch.zeros(8).int(), torch.zeros(16))),
        ("9", lambda: rotary.launch(torch.zeros(1, 1, 9), torch.zeros(1).long(), square[0])),
        ("33", lambda: route.launch(square, 33, True)),
        ("0", lambda: route.launch(square, 0, True)),
        ("[2, 1]", lambda: linears.launch(square[:1], [Matrix.of(fp8, torch.zeros(2, 1))])),
        ("40", lambda: linears.launch(torch.zeros(1, 40), [Matrix.of(torch.zeros(8, 40))])),
        ("4 matrices", lambda: linears.launch(square[:1], [matrix] * 4)),
        ("[31]", lambda: linears.launch(square, [matrix], Norm(torch.zeros(31), 0.1))),
        (
            "[1, 9]",
            lambda: linears.launch(square[:1], [matrix], None, torch.zeros(1, 9)),
        ),
        (
            "F8_E4M3",
            lambda: linears.launch(square[:1], [matrix, Matrix.of(fp8, torch.ones(1, 1))]),
        ),
        ("top_k is 5", lambda: choose.launch(torch.zeros(1, 4), 0, Routing(4, 5, True), pool(4))),
        ("[1, 3]", lambda: choose.launch(torch.zeros(1, 3), 0, Routing(4, 2, True), pool(4))),
        (
            "[1, 1, 1]",
            lambda: choose.launch(torch.zeros(1, 4), 0, Routing(4, 2, True), pool(4), short),
        ),
        ("torch.float32", lambda: FP8.decode((square, torch.zeros(1, 1)), torch.float32)),
        ("torch.int64", lambda: resolve.launch(torch.tensor([1]), pool(4))),
        (str(MAX_SLOTS + 1), lambda: resolve.launch(ints(1), pool(MAX_SLOTS + 1))),
        ("empty", lambda: resolve.launch(ints(), pool(4))),
        ("40", lambda: fetch.launch(records, records, found, marks)),
        ("[2]", lambda: fetch.launch(slots, slots, uneven, marks)),
        ("[1, 32]", lambda: expert_pairs(x[:, :32], slots, ints(0).view(1, 1), FMT, out)),
        ("torch.int64", lambda: expert_pairs(x, slots, torch.zeros(1, 1).long(), FMT, out)),
        (
            "24 x 64",
            lambda: expert_mlp.launch(x, x, slots, found, one, NARROW),
        ),
        (
            "4104",
            lambda: expert_mlp.launch(x, x, slots, found, one, SHIFTED),
        ),
        ("torch.int32", lambda: combine.launch(out, torch.zeros(1, 1), torch.int32)),
        ("[1, 2]", lambda: combine.launch(out, torch.zeros(1, 2), torch.float32)),
        ("96", step(q=torch.zeros(1, 96))),
        ("torch.float16", step(v=torch.zeros(1, 64).half())),
        ("torch.int32", step(position=ints(1))),
        ("[8, 2, 31]", step(values=torch.zeros(8, 2, 31))),
        ("(256, 2)", step(q=torch.zeros(1, 256)[:, ::2])),
        ("inv_freq has shape [32]", step(rotation=Rotation(torch.zeros(32), None, None, 0.0))),
        ("[65]", step(rotation=Rotation(torch.zeros(16), None, torch.zeros(65), 0.0))),
        (
            "288",
            step(
                q=torch.zeros(1, 288),
                k=torch.zeros(1, 288),
                v=torch.zeros(1, 288),
                keys=torch.zeros(4, 1, 288),
                values=torch.zeros(4, 1, 288),
            ),
        ),
    ]


@pytest.mark.parametrize("number", range(len(refusals())))
def test_refusals(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)  # checks only: nothing launches
    value, call = refusals()[number]
    with pytest.raises(ValueError) as caught:
        call()
    assert value in str(caught.value)


def test_cpu_tensors_are_refused_by_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="cpu"):
        rms_norm.launch(torch.zeros(1, 8), torch.zeros(8), 1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fetch_refuses_pageable_records() -> None:
    slots = torch.zeros(2, 64, dtype=torch.uint8, device="cuda")
    missing = Resolved(*(ints(value).cuda() for value in (0, 0, 0, 1)))
    marks = torch.zeros(NUM_MARKS, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="pageable"):
        fetch.launch(slots.cpu(), slots, missing, marks)
