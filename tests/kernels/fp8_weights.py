"""Random matrices in FP8."""

from __future__ import annotations

import torch

from seqmoe_kernels.formats.fp8_block import num_blocks


def random_fp8(gen: torch.Generator, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All 254 finite codes with equal chance, and scales over four orders of magnitude."""
    codes = torch.randint(0, 254, (rows, cols), generator=gen, dtype=torch.int16)
    codes = torch.where(codes >= 127, codes + 1, codes)  # leaves out 0x7f and 0xff
    scale = 10 ** (torch.rand(num_blocks(rows, cols), generator=gen) * 4 - 4)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), scale
