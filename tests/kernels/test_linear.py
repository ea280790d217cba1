"""FP8 decoding and the matrix-vector kernel against their torch references."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels import dequantize, linear
from seqmoe_kernels.fp8 import dequantize_reference, dequantize_triton, num_blocks
from seqmoe_kernels.gemv import Tiling, linear_reference, linear_triton

SHAPES = [(1, 16), (7, 96), (130, 128), (96, 576), (64, 2048), (256, 272)]


def random_fp8(gen: torch.Generator, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All 254 finite codes with equal chance, and scales over four orders of magnitude."""
    codes = torch.randint(0, 254, (rows, cols), generator=gen, dtype=torch.int16)
    codes = torch.where(codes >= 127, codes + 1, codes)  # leaves out 0x7f and 0xff
    scale = 10 ** (torch.rand(num_blocks(rows, cols), generator=gen) * 4 - 4)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), scale


def assert_close_to_product(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, tolerance: float
) -> None:
    """Compare with a float64 product, relative to the size of the terms of each sum."""
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    worst = ((got.cpu().double() - exact).abs() / size).max()
    assert worst <= tolerance, f"off by {worst} of the terms' magnitude"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_finite_code_decodes_exactly(device: torch.device, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    weight = codes.view(torch.float8_e4m3fn)
    one = torch.ones(1, 2)
    finite = ~weight.float().isnan()
    assert finite.sum() == 254
    got = dequantize_triton(weight.to(device), one.to(device), dtype).cpu()
    assert torch.equal(got[finite], weight.to(dtype)[finite])


@pytest.mark.parametrize("rows,cols", [(1, 16), (130, 260), (256, 128)])
def test_dequantize(device: torch.device, gen: torch.Generator, rows: int, cols: int) -> None:
    weight, scale = random_fp8(gen, rows, cols)
    got = dequantize_triton(weight.to(device), scale.to(device), torch.float32).cpu()
    expected = dequantize_reference(weight, scale, torch.float32)
    assert torch.equal(got, expected)
    assert torch.equal(dequantize(weight, scale, torch.float32), expected)
    row, col = rows - 1, cols - 1
    assert expected[row, col] == weight[row, col].float() * scale[row // 128, col // 128]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows,cols", SHAPES)
def test_gemv_plain(
    device: torch.device,
    gen: torch.Generator,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    bias: bool,
) -> None:
    x = torch.randn((1, cols), generator=gen).to(dtype)
    weight = torch.randn((rows, cols), generator=gen).to(dtype)
    shift = torch.randn(rows, generator=gen).to(dtype) if bias else None
    got = linear_triton(
        x.to(device), weight.to(device), bias=None if shift is None else shift.to(device)
    )
    assert got.dtype == dtype and got.shape == (1, rows)
    if shift is not None:  # a column more says the same as a bias
        x = torch.cat((x, torch.ones(1, 1, dtype=dtype)), 1)
        weight = torch.cat((weight, shift[:, None]), 1)
    # f32 sums; one rounding at the end, which the interpreter makes a cut for bfloat16
    unit = {torch.float32: 4e-7, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert_close_to_product(got, x, weight, unit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows,cols", SHAPES)
def test_gemv_fp8(
    device: torch.device, gen: torch.Generator, rows: int, cols: int, dtype: torch.dtype
) -> None:
    x = torch.randn((1, cols), generator=gen).to(dtype)
    weight, scale = random_fp8(gen, rows, cols)
    got = linear_triton(x.to(device), weight.to(device), scale.to(device))
    decoded = dequantize_reference(weight, scale, torch.float32)
    assert_close_to_product(got, x, decoded, 5e-7 if dtype == torch.float32 else 2**-7)
    reference = linear_reference(x, weight, scale)
    assert_close_to_product(reference, x, decoded, 5e-7 if dtype == torch.float32 else 2**-8)


def test_the_tiling_changes_rounding_at_most(device: torch.device, gen: torch.Generator) -> None:
    x = torch.randn((1, 640), generator=gen)
    weight, scale = random_fp8(gen, 24, 640)
    arguments = [tensor.to(device) for tensor in (x, weight, scale)]
    expected = linear_triton(*arguments, tiling=Tiling(16, 512, 2, 4))
    for tiling in (Tiling(2, 512, 1, 1), Tiling(8, 512, 2, 2)):
        # a compiler may fuse multiplications and additions of one tiling otherwise than another's
        got = linear_triton(*arguments, tiling=tiling)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-3)


def test_gemv_fp8_holds_extreme_values(device: torch.device) -> None:
    """Large activations times large scales, small times small: nothing overflows or vanishes."""
    for size in (2.0**-20, 2.0**20):
        x = torch.full((1, 32), size, device=device)
        smallest = torch.tensor([[1, 0x7E] * 16], dtype=torch.uint8, device=device)
        weight = smallest.view(torch.float8_e4m3fn)
        scale = torch.full((1, 1), size, device=device)
        expected = 16 * (2.0**-9 + 448) * size * size
        assert linear_triton(x, weight, scale).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tokens(device: torch.device, gen: torch.Generator, dtype: torch.dtype) -> None:
    """Matrix products round FP8 weights to the dtype first."""
    x = torch.randn((5, 96), generator=gen).to(dtype)
    weight, scale = random_fp8(gen, 130, 96)
    shift = torch.randn(130, generator=gen).to(dtype)
    got = linear_triton(x.to(device), weight.to(device), scale.to(device), shift.to(device))
    wide = torch.cat((dequantize_reference(weight, scale, torch.float32), shift[:, None]), 1)
    unit = 5e-7 if dtype == torch.float32 else 2**-7
    assert_close_to_product(got, torch.cat((x, torch.ones(5, 1)), 1), wide, unit)
    plain = torch.randn((130, 96), generator=gen).to(dtype)
    assert_close_to_product(linear_triton(x.to(device), plain.to(device)), x, plain, unit)


def test_linear_on_the_cpu_is_the_reference(gen: torch.Generator) -> None:
    x = torch.randn((2, 48), generator=gen).bfloat16()
    weight, scale = random_fp8(gen, 32, 48)
    assert torch.equal(linear(x, weight, scale), linear_reference(x, weight, scale))
