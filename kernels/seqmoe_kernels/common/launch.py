"""Programmatic dependent launch: a kernel starts while the one before it still runs.

Such a kernel may read ahead what no kernel of the step writes (weights, the KV state before the new
token, the position), and waits before it touches anything else. A kernel that is launched without
it, as all of torch's are, stands between the kernels before it and those after it: the embedding
does between two steps. On the devices that cannot do it (and in the interpreter) the same kernels
start one after the other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def use_pdl(device: torch.device) -> bool:
    """Whether kernels on this device are launched with `launch_pdl` and PDL = True."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that calls the two functions below."""
    return {"PDL": True, "launch_pdl": True} if use_pdl(device) else {"PDL": False}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Stands before the first access to memory that another kernel writes, or reads and this one
    writes: returns when all kernels before have ended and their writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """From here on the next kernel may start, as far as there is room for it."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def acquired(pointer):
    """Read an int32. What kernels that have ended wrote before is seen from here on, as behind
    `wait_for_inputs`; the kernel before this one may still run. With PDL only."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "=r,l",
        [pointer.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
