"""What Triton wrappers check of their tensors; each raises ValueError with the offending value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Sizes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of tensors, by name

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Require this dtype (one of these), this shape (-1: any size), this device, contiguity."""
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, allowed))}")
    sizes = zip(tensor.shape, shape, strict=False)
    if tensor.dim() != len(shape) or any(want not in (-1, got) for got, want in sizes):
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, expected {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous tensor")


def check_all(tensors: Any, sizes: Sizes, device: torch.device) -> None:
    """`check` each attribute of `tensors` that `sizes` names."""
    for name, (dtype, shape) in sizes.items():
        check(name, getattr(tensors, name), dtype, shape, device)


def zeros(sizes: Sizes, device: torch.device) -> dict[str, torch.Tensor]:
    """New tensors, by name."""
    return {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, (dtype, shape) in sizes.items()
    }


def check_link(records: torch.Tensor, slots: torch.Tensor) -> None:
    """Require uint8 `records` [N, R] and `slots` [S, R] that a kernel can copy between."""
    size = slots.shape[-1]
    if size % 16:
        raise ValueError(f"a record has {size} bytes, expected a multiple of 16")
    check("slots", slots, torch.uint8, (-1, size), slots.device)
    check("records", records, torch.uint8, (-1, size), records.device)
    check_pinned("records", records, slots.device)


def check_pinned(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Require of a tensor on the host that kernels on `device` can reach it."""
    if device.type == "cuda" and not tensor.is_cuda and not tensor.is_pinned():
        raise ValueError(f"{name} is in pageable memory, expected pinned memory")
