"""One decode step's attention against norm, rotation, writing and attending one after the other."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import pytest
import torch

from seqmoe_kernels import Rotation, attention_step
from seqmoe_kernels.attention.rope import rotary_reference
from seqmoe_kernels.dense.norm import rms_norm_reference

step_module: Any = importlib.import_module("seqmoe_kernels.attention.decode")
SPAN: int = step_module.SPAN

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Query and key heads may each be one rounding off (bfloat16 is cut off in the interpreter).
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
    torch.float16: {"rtol": 2**-9, "atol": 2**-11},
}
UNIT = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}
NORMS = ["none", "head", "full"]
SHAPES = [(4, 2, 32), (3, 1, 64), (2, 2, 96), (16, 2, 128), (1, 1, 192), (2, 1, 256)]


class Step(NamedTuple):
    """The arguments of `attention_step`; q, k, v are slices of one row."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    position: torch.Tensor
    rotation: Rotation
    scale: float

    def copy(self, device: torch.device, capacity: int | None = None) -> Step:
        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        row = torch.cat((self.q, self.k, self.v), 1).to(device)
        keys, values = (x[:capacity].clone().to(device) for x in (self.keys, self.values))
        return Step(
            *row.split([self.q.numel(), self.k.numel(), self.v.numel()], 1),
            keys,
            values,
            self.position.clone().to(device),
            Rotation(*(moved(x) for x in self.rotation[:3]), self.rotation.eps),
            self.scale,
        )


def step_at(
    gen: torch.Generator,
    position: int,
    shape: tuple[int, int, int] = (4, 2, 32),
    norm: str = "head",
    dtype: torch.dtype = torch.float32,
    capacity: int | None = None,
) -> Step:
    """A step whose KV state is NaN from `position` on: none of that may be read."""
    heads, kv_heads, dim = shape

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=gen).to(dtype)

    def weight(num_heads: int) -> torch.Tensor | None:
        return {"none": None, "head": random(dim), "full": random(num_heads * dim)}[norm]

    keys, values = random(2, capacity or position + 1, kv_heads, dim).unbind()
    keys[position:], values[position:] = float("nan"), float("nan")
    row = random(1, (heads + 2 * kv_heads) * dim).mul(2)
    inv_freq = 1e4 ** (-torch.arange(0, dim, 2) / dim)
    return Step(
        *row.split([heads * dim, kv_heads * dim, kv_heads * dim], 1),
        keys,
        values,
        torch.tensor([position]),
        Rotation(inv_freq, weight(heads), weight(kv_heads), 1e-5),
        0.7 * dim**-0.5,
    )


def expected_of(step: Step) -> torch.Tensor:
    """The same out of separate operations and torch's own attention; writes the KV state, too."""
    _, kv_heads, dim = step.keys.shape

    def rotated(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = rms_norm_reference(x.view(-1, len(weight)), weight, step.rotation.eps)
        return rotary_reference(x.view(1, -1, dim), step.position, step.rotation.inv_freq)

    q, k = rotated(step.q, step.rotation.q_norm), rotated(step.k, step.rotation.k_norm)
    step.keys[step.position] = k
    step.values[step.position] = step.v.view(1, kv_heads, dim)
    end = int(step.position) + 1
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None].float(),
        step.keys[:end].transpose(0, 1)[None].float(),
        step.values[:end].transpose(0, 1)[None].float(),
        scale=step.scale,
        enable_gqa=True,
    )
    return mixed.view(1, -1).to(step.q.dtype)


def run_triton(device: torch.device, step: Step, capacity: int | None = None) -> torch.Tensor:
    return run_there(step.copy(device, capacity))


def run_there(step: Step) -> torch.Tensor:
    out: torch.Tensor = step_module.attention_step.launch(*step)
    arrivals = step_module._arrivals(step.q.device, step.keys.shape[1])
    assert not arrivals.any()  # ready for the next launch
    return out.cpu()


def check_against_expected(device: torch.device, step: Step) -> None:
    dtype, here = step.q.dtype, int(step.position)
    there, step = step.copy(device), step.copy(torch.device("cpu"))
    before = step.copy(torch.device("cpu"))
    got, expected = run_there(there), expected_of(step)
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])
    keys, values = there.keys.cpu(), there.values.cpu()
    assert torch.equal(values[here], step.values[here])
    first, second = step.keys[here].double().chunk(2, -1)
    pair_length = torch.cat((first.hypot(second),) * 2, -1)  # rotation may cancel most of a value
    assert ((keys[here] - step.keys[here]).double().abs() / pair_length).max() <= 3 * UNIT[dtype]
    for got_state, was in ((keys, before.keys), (values, before.values)):
        got_state[here] = was[here]
        assert torch.equal(got_state.nan_to_num(7), was.nan_to_num(7))  # all else as it was


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_separate_operations(
    device: torch.device,
    gen: torch.Generator,
    shape: tuple[int, int, int],
    norm: str,
    dtype: torch.dtype,
) -> None:
    position = SPAN + 33
    step = step_at(gen, position, shape, norm, dtype, capacity=3 * SPAN)
    check_against_expected(device, step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [0, 1, SPAN - 1, SPAN, 2 * SPAN - 1, 5 * SPAN + 7])
def test_positions_at_the_edges_of_spans(
    device: torch.device, gen: torch.Generator, position: int, dtype: torch.dtype
) -> None:
    check_against_expected(device, step_at(gen, position, (8, 2, 32), dtype=dtype, capacity=900))


@pytest.mark.parametrize("position", [4 * SPAN - 1, 4 * SPAN, 10 * SPAN + 5])
def test_spans_grow_where_there_would_be_too_many(
    device: torch.device, gen: torch.Generator, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "MAX_SPANS", 4)
    step = step_at(gen, position, capacity=15 * SPAN)
    check_against_expected(device, step)
    assert torch.equal(run_triton(device, step), run_triton(device, step, position + 1))


@pytest.mark.parametrize(
    "kv_heads,group,dim,most", [(4, 8, 128, 32), (8, 4, 128, 16), (2, 8, 256, 16)]
)
def test_spans_of_a_kv_head(kv_heads: int, group: int, dim: int, most: int) -> None:
    assert step_module._most_spans(kv_heads, group * dim) == most


@pytest.mark.parametrize("position", [0, SPAN + 50, 3 * SPAN])
def test_bits_depend_neither_on_capacity_nor_on_the_launch_before(
    device: torch.device, gen: torch.Generator, position: int
) -> None:
    step = step_at(gen, position, capacity=6 * SPAN)
    whole = run_triton(device, step)
    for capacity in (position + 1, position + SPAN, 6 * SPAN):
        assert torch.equal(run_triton(device, step, capacity), whole)


def test_steps_one_after_the_other(device: torch.device, gen: torch.Generator) -> None:
    """Each step attends to what the steps before have written, across the edge of a span."""
    here = step_at(gen, SPAN - 2, dtype=torch.float16, capacity=SPAN + 2)
    there = here.copy(device)
    for _ in range(4):
        torch.testing.assert_close(run_there(there), expected_of(here), **TOLERANCE[torch.float16])
        here.position.add_(1)
        there.position.add_(1)
        for step in (here, there):
            step.q.copy_(step.q.roll(1, 1))


def test_a_new_token_far_above_the_others(device: torch.device, gen: torch.Generator) -> None:
    """Its weight is all there is, in its own span and against the span before."""
    step = step_at(gen, SPAN + 9, (2, 2, 32), "none")
    step.k.copy_(step.q * 100)
    got = run_triton(device, step)
    torch.testing.assert_close(got, step.v)


@pytest.mark.parametrize("norm", NORMS)
def test_verb_on_the_cpu_is_the_reference(gen: torch.Generator, norm: str) -> None:
    step = step_at(gen, 21, (6, 2, 32), norm, torch.bfloat16, capacity=30)
    other = step.copy(torch.device("cpu"))
    got = attention_step(*step._replace(q=step.q[0]))
    torch.testing.assert_close(got, expected_of(other), rtol=2**-7, atol=2**-8)
    assert torch.equal(step.keys[:22], other.keys[:22])
    assert torch.equal(step.values[:22], other.values[:22])
    assert step.keys[22:].isnan().all() and step.values[22:].isnan().all()
