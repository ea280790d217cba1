"""The device's clock, in nanoseconds."""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def now_ns_reference() -> int:
    return time.perf_counter_ns()


@triton.jit
def now_ns():
    """An int64 scalar; the interpreter, which runs on no device, has a clock that stands at 1."""
    if _INTERPRETED:
        return tl.full((), 1, tl.int64)
    else:
        return globaltimer()


def add_span_reference(total: torch.Tensor, began: torch.Tensor, ended: int) -> None:
    """Add the time since `began` to `total`, both int64 [1]; nothing if it has not begun."""
    if began:
        total += ended - int(began)
