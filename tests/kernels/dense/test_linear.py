"""The matrix-vector kernel against its torch reference."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels import Matrix, Norm, linear, linears
from seqmoe_kernels.dense.linear import (
    linear_reference,
    linears_reference,
    normed_linear,
    one_token,
)
from seqmoe_kernels.dense.tiling import RowTiling, linear_tiling
from seqmoe_kernels.formats.fp8_block import FP8
from tests.kernels.fp8_weights import random_fp8

SHAPES = [(1, 16), (7, 96), (130, 128), (96, 576), (64, 2048), (256, 272), (5, 8208)]


def launched(
    x: torch.Tensor, *parts: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return linears.launch(x, [Matrix.of(*parts, bias=bias)])[0]


def assert_close_to_product(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, tolerance: float
) -> None:
    """Compare with a float64 product, relative to the size of the terms of each sum."""
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    worst = ((got.cpu().double() - exact).abs() / size).max()
    assert worst <= tolerance, f"off by {worst} of the terms' magnitude"


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
    moved = None if shift is None else shift.to(device)
    got = launched(x.to(device), weight.to(device), bias=moved)
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
    got = launched(x.to(device), weight.to(device), scale.to(device))
    decoded = FP8.decode((weight, scale), torch.float32)
    assert_close_to_product(got, x, decoded, 5e-7 if dtype == torch.float32 else 2**-7)
    reference = linear_reference(x, Matrix.of(weight, scale))
    assert_close_to_product(reference, x, decoded, 5e-7 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_the_tiling_changes_rounding_at_most(
    device: torch.device, gen: torch.Generator, normed: bool, fp8: bool, dtype: torch.dtype
) -> None:
    """Whether all columns of a row are on their way at once or come in several batches."""
    x = torch.randn((1, 640), generator=gen).mul(3).to(device, dtype)
    (matrix,) = random_matrices(gen, 640, [24], dtype, fp8, True)
    norm = Norm((torch.rand(640, generator=gen) + 0.5).to(device, dtype), 1e-6) if normed else None
    matrix = on(device, matrix)
    expected = one_token(x, [matrix], norm, None, RowTiling(4, 2, 4))
    # a compiler may fuse multiplications and additions of one tiling otherwise than another's
    rtol, atol = {torch.float32: (1e-5, 3e-3), torch.bfloat16: (2**-7, 1e-2)}[dtype]
    for tiling in (RowTiling(2, 1, 1), RowTiling(8, 1, 2), RowTiling(16, 2, 1)):
        got = one_token(x, [matrix], norm, None, tiling)
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("cols", [768, 2048, 2880, 4096, 5120, 14336])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_tiling_of_a_linear_layer(dtype: torch.dtype, cols: int) -> None:
    """A program has 16 KiB on their way at once, of two rows at least; no tile is all rest."""
    for num_rows in (1, 128, 10**6):
        rows, tiles, num_warps = linear_tiling(num_rows, cols * dtype.itemsize, torch.device("cpu"))
        assert rows in (2, 4, 8) and rows * tiles * num_warps * 512 <= 2**14
        assert rows == 2 or rows * 3 <= num_rows
        needed = -(-cols * dtype.itemsize // (num_warps * 512))
        assert -(-needed // tiles) == -(-needed * rows // 8)  # the fewest batches


def test_gemv_fp8_holds_extreme_values(device: torch.device) -> None:
    """Large activations times large scales, small times small: nothing overflows or vanishes."""
    for size in (2.0**-20, 2.0**20):
        x = torch.full((1, 32), size, device=device)
        smallest = torch.tensor([[1, 0x7E] * 16], dtype=torch.uint8, device=device)
        weight = smallest.view(torch.float8_e4m3fn)
        scale = torch.full((1, 1), size, device=device)
        expected = 16 * (2.0**-9 + 448) * size * size
        assert launched(x, weight, scale).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tokens(device: torch.device, gen: torch.Generator, dtype: torch.dtype) -> None:
    """Matrix products round FP8 weights to the dtype first."""
    x = torch.randn((5, 96), generator=gen).to(dtype)
    weight, scale = random_fp8(gen, 130, 96)
    shift = torch.randn(130, generator=gen).to(dtype)
    got = launched(x.to(device), weight.to(device), scale.to(device), bias=shift.to(device))
    wide = torch.cat((FP8.decode((weight, scale), torch.float32), shift[:, None]), 1)
    unit = 5e-7 if dtype == torch.float32 else 2**-7
    assert_close_to_product(got, torch.cat((x, torch.ones(5, 1)), 1), wide, unit)
    plain = torch.randn((130, 96), generator=gen).to(dtype)
    assert_close_to_product(launched(x.to(device), plain.to(device)), x, plain, unit)


def test_linear_on_the_cpu_is_the_reference(gen: torch.Generator) -> None:
    x = torch.randn((2, 48), generator=gen).bfloat16()
    weight, scale = random_fp8(gen, 32, 48)
    assert torch.equal(
        linear(x, Matrix.of(weight, scale)), linear_reference(x, Matrix.of(weight, scale))
    )


UNITS = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def random_matrices(
    gen: torch.Generator, cols: int, rows: list[int], dtype: torch.dtype, fp8: bool, bias: bool
) -> list[Matrix]:
    matrices = []
    for size in rows:
        parts: tuple[torch.Tensor, ...] = (torch.randn((size, cols), generator=gen).to(dtype),)
        if fp8:
            parts = random_fp8(gen, size, cols)
        shift = torch.randn(size, generator=gen).to(dtype) if bias else None
        matrices.append(Matrix.of(*parts, bias=shift))
    return matrices


def on(device: torch.device, matrix: Matrix) -> Matrix:
    bias = None if matrix.bias is None else matrix.bias.to(device)
    return Matrix.of(*(part.to(device) for part in matrix.parts), bias=bias)


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    "rows,normed,bias", [([40], True, False), ([130, 8], False, True), ([64, 130, 7], True, True)]
)
def test_several_matrices_after_one_norm(
    device: torch.device,
    gen: torch.Generator,
    rows: list[int],
    normed: bool,
    bias: bool,
    tokens: int,
    dtype: torch.dtype,
    fp8: bool,
) -> None:
    """One launch gives what a norm and one product after the other give."""
    cols = 208
    x = torch.randn((tokens, cols), generator=gen).mul(3).to(dtype)
    norm = Norm((torch.rand(cols, generator=gen) + 0.5).to(dtype), 1e-6) if normed else None
    matrices = random_matrices(gen, cols, rows, dtype, fp8, bias)
    expected = linears_reference(x, matrices, norm)
    moved = None if norm is None else Norm(norm.weight.to(device), norm.eps)
    got = linears.launch(x.to(device), [on(device, m) for m in matrices], moved)
    h = x if norm is None else norm_by_hand(x, norm)
    for matrix, out, reference in zip(matrices, got, expected, strict=True):
        assert out.shape == (tokens, matrix.rows) and out.dtype == dtype
        weight, *others = matrix.parts
        size = linear_reference(h.abs(), Matrix.of(weight.float().abs().to(weight.dtype), *others))
        size = size.float() + (0 if matrix.bias is None else matrix.bias.float().abs())
        worst = ((out.cpu().float() - reference.float()).abs() / size).max()
        assert worst <= UNITS[dtype], f"off by {worst} of the terms' magnitude"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_normed_input_comes_with_the_product(
    device: torch.device, gen: torch.Generator, tokens: int, dtype: torch.dtype
) -> None:
    x = torch.randn((tokens, 208), generator=gen).mul(3).to(dtype)
    norm = Norm((torch.rand(208, generator=gen) + 0.5).to(dtype), 1e-6)
    (matrix,) = random_matrices(gen, 208, [40], dtype, False, False)
    moved = Norm(norm.weight.to(device), norm.eps)
    h, product = normed_linear.launch(x.to(device), moved, on(device, matrix))
    expected = normed_linear(x, norm, matrix)
    for got, reference in zip((h, product), expected, strict=True):
        torch.testing.assert_close(
            got.cpu(), reference, rtol=UNITS[dtype] * 2, atol=0.3 * (dtype == torch.bfloat16) + 1e-4
        )


def norm_by_hand(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    wide = x.double()
    normal = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return normal.to(x.dtype) * norm.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2])
def test_the_residual_is_added_after_rounding(
    device: torch.device, gen: torch.Generator, tokens: int, dtype: torch.dtype
) -> None:
    x = torch.randn((tokens, 96), generator=gen).to(dtype)
    matrix = Matrix.of(torch.randn((40, 96), generator=gen).to(dtype))
    residual = torch.randn((tokens, 40), generator=gen).mul(100).to(dtype)
    (product,) = linears.launch(x.to(device), [on(device, matrix)])
    (got,) = linears.launch(x.to(device), [on(device, matrix)], None, residual.to(device))
    if device.type == "cuda" or dtype == torch.float32:  # the interpreter cuts in two places
        assert torch.equal(got, residual.to(device) + product)
    torch.testing.assert_close(
        got.cpu(),
        linear(x, matrix, residual=residual),
        rtol=2**-6,
        atol=1.0 if dtype == torch.bfloat16 else 1e-5,
    )


def test_linears_on_the_cpu_is_the_reference(gen: torch.Generator) -> None:
    x, norm = torch.randn((2, 48), generator=gen), Norm(torch.ones(48), 1e-6)
    matrices = random_matrices(gen, 48, [16, 4], torch.float32, False, True)
    for got, expected in zip(
        linears(x, matrices, norm), linears_reference(x, matrices, norm), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_more_rows_behind_a_product_leave_its_bits_alone(
    device: torch.device, gen: torch.Generator, tokens: int, dtype: torch.dtype
) -> None:
    x = torch.randn((tokens, 208), generator=gen).to(device, dtype)
    norm = Norm((torch.rand(208, generator=gen) + 0.5).to(device, dtype), 1e-6)
    matrix, more = random_matrices(gen, 208, [40, 120], dtype, False, False)
    matrix, more = on(device, matrix), on(device, more)
    h, both = normed_linear.launch(x, norm, matrix, more)
    for part, alone in ((both[:, :40], matrix), (both[:, 40:], more)):
        expected_h, expected = normed_linear.launch(x, norm, alone)
        assert torch.equal(h, expected_h)
        if alone is matrix:
            assert torch.equal(part, expected)
        else:
            torch.testing.assert_close(part, expected)
