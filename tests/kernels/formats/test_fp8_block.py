"""FP8 decoding, by tiles and in plain torch."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels.formats import decode_by_tiles
from seqmoe_kernels.formats.fp8_block import FP8
from tests.kernels.fp8_weights import random_fp8


def by_tiles(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    out = torch.empty(weight.shape, dtype=dtype, device=device)
    decode_by_tiles(FP8.tiles, weight.to(device).view(torch.int8), (scale.to(device),), out)
    return out.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_finite_code_decodes_exactly(device: torch.device, dtype: torch.dtype) -> None:
    weight = torch.arange(256, dtype=torch.uint8).view(1, 256).view(torch.float8_e4m3fn)
    finite = ~weight.float().isnan()
    assert finite.sum() == 254
    got = by_tiles(weight, torch.ones(1, 2), dtype, device)
    assert torch.equal(got[finite], weight.to(dtype)[finite])


@pytest.mark.parametrize("rows,cols", [(1, 16), (130, 260), (256, 128)])
def test_decode(device: torch.device, gen: torch.Generator, rows: int, cols: int) -> None:
    weight, scale = random_fp8(gen, rows, cols)
    expected = FP8.decode((weight, scale), torch.float32)
    assert torch.equal(by_tiles(weight, scale, torch.float32, device), expected)
    got = FP8.decode((weight.to(device), scale.to(device)), torch.float32)
    assert torch.equal(got.cpu(), expected)
    row, col = rows - 1, cols - 1
    assert expected[row, col] == weight[row, col].float() * scale[row // 128, col // 128]
