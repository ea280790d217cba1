"""What a benchmark row says about the machine and the build: names, versions, and ceilings, which
are measured anew in each run, in well under a second. Imports torch when it is asked."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from seqmoe_cli import __version__

if TYPE_CHECKING:
    import torch

_MEMORY_BYTES, _LINK_BYTES = 2**31, 2**28  # of one copy; far beyond the L2 cache
COPIES = 7


def machine_facts(device_type: str) -> dict[str, str]:
    """Names and versions, empty where there is no such thing; the GPU and its driver only when
    `device_type` is cuda."""
    import torch

    on_gpu = device_type == "cuda"
    return {
        "cpu_info": _cpu_name(),
        "gpu_info": torch.cuda.get_device_name() if on_gpu else "",
        "driver": driver_version() if on_gpu else "",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "build_commit": build_commit(),
    }


def build_commit() -> str:
    """The commit of the checkout that this runs from, `-dirty` when it was edited; for an
    installed package its version. SEQMOE_COMMIT names it where a tree was copied without its
    history."""
    if named := os.environ.get("SEQMOE_COMMIT"):
        return named
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return __version__
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    return _output_of(command) or __version__


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def driver_version() -> str:
    """The NVIDIA driver's version, from the kernel module or else from nvidia-smi; or empty."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _read("/sys/module/nvidia/version").strip() or _output_of(command).partition("\n")[0]


def _output_of(command: list[str]) -> str:
    """What a program prints; empty when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Ceilings:
    """In GB/s. `copy`: a copy within the device's memory, bytes read plus bytes written.
    `link`: a DMA copy of records from pinned host memory."""

    copy_gb_per_s: float
    link_gb_per_s: float

    @classmethod
    def measure(cls, records: torch.Tensor, device: torch.device) -> Ceilings:
        """`records` uint8 [N, R] is pinned. The median of several copies each."""
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        host = records.view(-1)[:_LINK_BYTES]
        link = gb_per_s(torch.empty_like(host, device=device), host)
        source = torch.zeros(min(_MEMORY_BYTES, free // 4), dtype=torch.uint8, device=device)
        return cls(2 * gb_per_s(torch.empty_like(source), source), link)


def gb_per_s(target: torch.Tensor, source: torch.Tensor) -> float:
    """Of copies from one tensor into another, by the device's clock: the median of several."""
    import torch

    times: list[float] = []
    for _ in range(COPIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return target.nbytes / statistics.median(times) / 1e6
