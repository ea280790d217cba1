"""FP8 decoding against its torch reference."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels.formats.fp8_block import dequantize, dequantize_reference
from tests.kernels.fp8_weights import random_fp8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_finite_code_decodes_exactly(device: torch.device, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    weight = codes.view(torch.float8_e4m3fn)
    one = torch.ones(1, 2)
    finite = ~weight.float().isnan()
    assert finite.sum() == 254
    got = dequantize.launch(weight.to(device), one.to(device), dtype).cpu()
    assert torch.equal(got[finite], weight.to(dtype)[finite])


@pytest.mark.parametrize("rows,cols", [(1, 16), (130, 260), (256, 128)])
def test_dequantize(device: torch.device, gen: torch.Generator, rows: int, cols: int) -> None:
    weight, scale = random_fp8(gen, rows, cols)
    got = dequantize.launch(weight.to(device), scale.to(device), torch.float32).cpu()
    expected = dequantize_reference(weight, scale, torch.float32)
    assert torch.equal(got, expected)
    assert torch.equal(dequantize(weight, scale, torch.float32), expected)
    row, col = rows - 1, cols - 1
    assert expected[row, col] == weight[row, col].float() * scale[row // 128, col // 128]
