"""How much host memory this process may still take: the machine's, within the limits of cgroups."""

from __future__ import annotations

from pathlib import Path

_UNLIMITED = 2**62  # cgroup v1 writes "no limit" as a number near 2^63


def available_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The smaller of MemAvailable and what the cgroups around the process leave."""
    return min([_mem_available(proc), *_cgroup_headrooms(proc, cgroups)])


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _cgroup_headrooms(proc: Path, cgroups: Path) -> list[int]:
    """What is left in the process's cgroup and in each one above it (version 2, or 1)."""
    headrooms: list[int] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return headrooms
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit = cgroups / "memory", "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        folder = root / path.strip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(root):
                headrooms += _headroom(place, limit, usage)
    return headrooms


def _headroom(folder: Path, limit_file: str, usage_file: str) -> list[int]:
    """Limit less usage, not counting file pages that the kernel can drop; empty without a limit."""
    try:
        limit = int((folder / limit_file).read_text())
        usage = int((folder / usage_file).read_text())
        fields = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        stats = {name: int(value) for name, value in fields}
    except (OSError, ValueError):  # no such file, or the limit reads "max"
        return []
    if limit >= _UNLIMITED:
        return []
    droppable = stats.get("inactive_file", 0) + stats.get("active_file", 0)
    return [max(0, limit - max(0, usage - droppable))]
