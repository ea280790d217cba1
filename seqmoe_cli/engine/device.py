"""Which device and compute type to use, and how much memory there is."""

from __future__ import annotations

from typing import NamedTuple

import torch

from seqmoe_cli.errors import ResourceError, UnsupportedError
from seqmoe_cli.settings import EngineOptions


class Placement(NamedTuple):
    """Where and in which type the engine computes; `fallbacks` says what was not as asked."""

    device: torch.device
    dtype: torch.dtype
    fallbacks: list[str]


def choose_placement(options: EngineOptions) -> Placement:
    """Resolve `auto`: the first GPU if there is one, bfloat16 there and float32 on a CPU."""
    fallbacks = []
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ResourceError(
            "--device cuda: no usable CUDA device", "see `seqmoe doctor`, or use --device cpu"
        )
    use_cuda = options.device != "cpu" and torch.cuda.is_available()
    if options.device == "auto" and not use_cuda:
        fallbacks.append("no usable CUDA device: computing on the CPU")
    if use_cuda and torch.cuda.get_device_capability()[0] < 8:
        raise UnsupportedError(
            f"{torch.cuda.get_device_name()} is too old: compute capability 8.0 is needed",
            "use --device cpu",
        )
    name = options.dtype
    if name == "auto":
        name = "bfloat16" if use_cuda else "float32"
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
    return Placement(device, dtype, fallbacks)


def free_device_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device."""
    return torch.cuda.mem_get_info(device)[0]
