"""What a benchmark row says about the machine and the build."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from seqmoe_cli import __version__


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
