"""Attention of one query token against its torch reference."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels import attention_decode
from seqmoe_kernels.attention import SPAN, attention_decode_reference, attention_decode_triton

# Softmax weights are rounded to TF32 beside 16-bit values; the result is rounded once (cut off, for
# bfloat16, in the interpreter).
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-9},
    torch.float16: {"rtol": 2**-9, "atol": 2**-10},
}


def inputs(
    gen: torch.Generator, heads: int, kv_heads: int, dim: int, capacity: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn((heads, dim), generator=gen).mul(3).to(dtype)
    keys = torch.randn((capacity, kv_heads, dim), generator=gen).to(dtype)
    values = torch.randn((capacity, kv_heads, dim), generator=gen).to(dtype)
    return q, keys, values


def run_triton(
    device: torch.device,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: int,
    scale: float,
) -> torch.Tensor:
    count = torch.tensor([length], dtype=torch.int32)
    moved = [tensor.to(device) for tensor in (q, keys, values, count)]
    return attention_decode_triton(*moved, scale).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "heads,kv_heads,dim",
    [(4, 2, 32), (3, 1, 64), (2, 2, 96), (16, 2, 128), (1, 1, 192), (2, 1, 256)],
)
@pytest.mark.parametrize("length", [1, SPAN + 33])
def test_against_the_reference(
    device: torch.device,
    gen: torch.Generator,
    heads: int,
    kv_heads: int,
    dim: int,
    length: int,
    dtype: torch.dtype,
) -> None:
    q, keys, values = inputs(gen, heads, kv_heads, dim, 3 * SPAN, dtype)
    count = torch.tensor([length], dtype=torch.int32)
    expected = attention_decode_reference(q, keys, values, count, dim**-0.5)
    keys[length:], values[length:] = float("nan"), float("nan")  # must not be read
    got = run_triton(device, q, keys, values, length, dim**-0.5)
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("length", [SPAN, SPAN + 1, 17 * SPAN + 5])
def test_span_edges_and_a_second_tile_of_spans(
    device: torch.device, gen: torch.Generator, length: int
) -> None:
    q, keys, values = inputs(gen, 2, 1, 32, length, torch.float32)
    count = torch.tensor([length], dtype=torch.int32)
    expected = attention_decode_reference(q, keys, values, count, 0.2)
    got = run_triton(device, q, keys, values, length, 0.2)
    torch.testing.assert_close(got, expected, **TOLERANCE[torch.float32])


def test_bits_do_not_depend_on_capacity(device: torch.device, gen: torch.Generator) -> None:
    q, keys, values = inputs(gen, 4, 2, 64, 5 * SPAN, torch.float32)
    length = SPAN + 50
    whole = run_triton(device, q, keys, values, length, 0.125)
    for capacity in (length, 2 * SPAN, 3 * SPAN + 1):
        part = run_triton(device, q, keys[:capacity], values[:capacity], length, 0.125)
        assert torch.equal(part, whole)


def test_each_head_reads_its_own_group(gen: torch.Generator) -> None:
    """Against torch's own attention: query heads 0-2 read KV head 0, heads 3-5 read KV head 1."""
    q, keys, values = inputs(gen, 6, 2, 32, 20, torch.float32)
    count = torch.tensor([13], dtype=torch.int32)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[None, :, None],
        keys[None, :13].transpose(1, 2),
        values[None, :13].transpose(1, 2),
        scale=0.3,
        enable_gqa=True,
    )[0, :, 0]
    torch.testing.assert_close(attention_decode(q, keys, values, count, 0.3), expected)
