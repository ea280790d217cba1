"""Ceilings of a machine with a GPU: how fast its memory copies, and how fast the link brings
records from the host. Measured anew in each run, in well under a second."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

_MEMORY_BYTES, _LINK_BYTES = 2**31, 2**28  # of one copy; far beyond the L2 cache
COPIES = 7


@dataclass(frozen=True)
class Ceilings:
    """In GB/s. `copy`: a copy within the device's memory, bytes read plus bytes written.
    `link`: a DMA copy of records from pinned host memory."""

    copy_gb_per_s: float
    link_gb_per_s: float

    @classmethod
    def measure(cls, records: torch.Tensor, device: torch.device) -> Ceilings:
        """`records` uint8 [N, R] is pinned. The median of several copies each."""
        free, _ = torch.cuda.mem_get_info(device)
        host = records.view(-1)[:_LINK_BYTES]
        return cls(
            copy_gb_per_s=copy_gb_per_s(min(_MEMORY_BYTES, free // 4), device),
            link_gb_per_s=gb_per_s(torch.empty_like(host, device=device), host),
        )


def copy_gb_per_s(num_bytes: int, device: torch.device) -> float:
    """Of copies of `num_bytes` within the device's memory, bytes read plus bytes written."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return 2 * gb_per_s(torch.empty_like(source), source)


def gb_per_s(target: torch.Tensor, source: torch.Tensor) -> float:
    """Of copies from one tensor into another, by the device's clock: the median of several."""
    times: list[float] = []
    for _ in range(COPIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return target.nbytes / statistics.median(times) / 1e6
