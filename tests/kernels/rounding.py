"""Types of numbers, and how far a rounded result may be from its reference."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The largest relative error of one rounding; the interpreter cuts bfloat16 off instead.
UNIT = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}


def assert_rounded(
    got: torch.Tensor, expected: torch.Tensor, num_roundings: int, slack: float = 0.0
) -> None:
    limit = num_roundings * UNIT[expected.dtype]
    torch.testing.assert_close(got.cpu(), expected, rtol=limit, atol=slack)
