"""seqmoe doctor: what this machine offers to seqmoe, and what stands in its way.

Every check is made on its own, so that a broken torch or a missing GPU hides nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import typer

from seqmoe_cli import paths
from seqmoe_cli.bench.machine import driver_version
from seqmoe_cli.commands.options import JsonOption
from seqmoe_weights.files import readable_size as size
from seqmoe_weights.memory import available_host_bytes

GIB = 2**30
LINK_BYTES = 256 * 2**20  # one measured copy; long enough to reach the link's full speed
SLOW_LINK_GB_S = 10.0  # a card in 16 lanes of PCIe 3 reaches about 12
SMALL_RAM_BYTES = 16 * GIB  # the smallest real model that is supported needs about this much
SMALL_DISK_BYTES = 16 * GIB
STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True)
class Check:
    """One line of the report: `status` is ok, warning or error; `numbers` are for scripts."""

    name: str
    status: str
    value: str
    hint: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


def doctor(
    as_json: JsonOption = False,
) -> None:
    """Check GPU, software, link speed, memory and disk.

    Exits with 1 when something is wrong that keeps seqmoe from working; a missing GPU does not.
    """
    checks = [check for make in CHECKS for check in _attempt(make)]
    worst = max((check.status for check in checks), key=list(STYLES).index)
    if as_json:
        print(
            json.dumps({"status": worst, "checks": [asdict(check) for check in checks]}, indent=2)
        )
    else:
        _show(checks)
    if worst == "error":
        raise typer.Exit(1)


def _attempt(make: Callable[[], Iterator[Check]]) -> list[Check]:
    """The checks of one group; whatever goes wrong in it becomes an error in the report."""
    checks: list[Check] = []
    try:
        checks.extend(make())
    except Exception as error:  # a broken installation can raise anything
        name = make.__name__.removeprefix("_check_").replace("_", " ")
        checks.append(Check(name, "error", f"{type(error).__name__}: {error}"))
    return checks


def _show(checks: list[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    from seqmoe_cli.terminal.console import make_console

    table = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        value = Text(check.value)
        if check.hint:
            value.append(f"\n{check.hint}", style="dim")
        table.add_row(check.name, Text(check.status, STYLES[check.status]), value)
    make_console(sys.stdout).print(table)


def _judged(
    name: str, value: str, wrong: bool, status: str, hint: str, **numbers: Any
) -> Iterator[Check]:
    """A check that is ok unless something is `wrong`; then it has a status and a hint."""
    yield Check(name, status if wrong else "ok", value, hint if wrong else "", numbers)


def _has_cuda() -> bool:
    """False also when torch itself is broken, which is reported once, as torch's own check."""
    try:
        import torch
    except Exception:
        return False
    return torch.cuda.is_available()


def _check_torch() -> Iterator[Check]:
    try:
        import torch
    except Exception as error:  # ImportError or OSError, most often
        yield Check("torch", "error", f"{error}", "install seqmoe again in a new environment")
    else:
        yield Check("torch", "ok", torch.__version__, numbers={"cuda": torch.version.cuda})


def _check_triton() -> Iterator[Check]:
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        yield Check("triton", "warning", "not installed", "a GPU needs it: pip install triton")
        return
    import triton  # noqa: F401 - to see that it can be imported

    yield Check("triton", "ok", version)


def _check_gpu() -> Iterator[Check]:
    if not _has_cuda():
        hint = "models run on the CPU, slowly; a GPU needs NVIDIA's driver and a torch with CUDA"
        yield Check("gpu", "warning", "none that torch can use", hint)
        return
    import torch

    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    capability = f"{properties.major}.{properties.minor}"
    value = f"{properties.name}, {size(total)} ({size(free)} free), capability {capability}"
    hint = "capability 8.0 or newer is needed; use --device cpu"
    numbers = {"total_bytes": total, "free_bytes": free, "capability": capability}
    yield from _judged("gpu", value, properties.major < 8, "error", hint, **numbers)
    yield Check("driver", "ok", driver_version() or "version unknown")


def _check_link() -> Iterator[Check]:
    """Measure copies from pinned host memory, the road that every expert takes."""
    if not _has_cuda():
        return
    import torch

    from seqmoe_cli.bench.machine import COPIES, gb_per_s

    source = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    rate = gb_per_s(torch.empty_like(source, device="cuda"), source)
    value = f"{rate:.1f} GB/s from pinned memory (median of {COPIES} copies of {size(LINK_BYTES)})"
    hint = "slower than 16 lanes of PCIe 3: does the card have all its lanes?"
    yield from _judged("link", value, rate < SLOW_LINK_GB_S, "warning", hint, gb_per_s=rate)


def _check_ram() -> Iterator[Check]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = available_host_bytes()
    value = f"{size(free)} available of {size(total)}"
    hint = f"all experts of a model must fit; most need more than {size(SMALL_RAM_BYTES)}"
    numbers = {"total_bytes": total, "available_bytes": free}
    yield from _judged("ram", value, free < SMALL_RAM_BYTES, "warning", hint, **numbers)


def _check_pin_limit() -> Iterator[Check]:
    """`ulimit -l`, and whether pinning more than that works all the same: most drivers do not
    count memory that is pinned for a GPU."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    endless = limit == resource.RLIM_INFINITY
    value = "none" if endless else f"{size(limit)} (ulimit -l)"
    if not endless and limit < LINK_BYTES and _has_cuda():
        import torch

        torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        value += f"; the driver pinned {size(LINK_BYTES)} all the same"
    yield Check("pin limit", "ok", value, numbers={"limit_bytes": None if endless else limit})


def _check_disk() -> Iterator[Check]:
    folder = paths.models_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    status, hint = "warning", "a packed model takes as much as its checkpoint: give DST to convert"
    closed = not os.access(existing, os.W_OK | os.X_OK)
    if closed:
        status = "error"
        hint = f"{existing} is not writable: give DST to convert, or set SEQMOE_HOME"
    value, wrong = f"{size(free)} free for {folder}", closed or free < SMALL_DISK_BYTES
    yield from _judged("disk", value, wrong, status, hint, free_bytes=free, path=str(folder))


CHECKS = (_check_torch, _check_triton, _check_gpu, _check_link, _check_ram, _check_pin_limit,
          _check_disk)  # fmt: skip
