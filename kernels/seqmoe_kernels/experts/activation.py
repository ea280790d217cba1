"""What experts make of the products with gate and up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


class Activation(NamedTuple):
    """Elements of gate(h) and up(h), f32 -> what down is multiplied with, f32."""

    kernel: Any  # (gate, up), a function of Triton
    reference: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@triton.jit
def _swiglu(gate, up):
    return gate / (1 + tl.exp(-gate)) * up


SWIGLU = Activation(_swiglu, lambda gate, up: F.silu(gate) * up)
