"""Memory: what the host has, and how little a conversion takes of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seqmoe_weights.memory import available_host_bytes
from tests.checkpoints import write_checkpoint

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """/proc and /sys/fs/cgroup of a machine with 64 GiB available and one nested cgroup."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    meminfo = f"MemTotal: 99 kB\nMemAvailable:   {64 * GIB // 1024} kB\n"
    (tmp_path / "proc" / "meminfo").write_text(meminfo, "utf-8")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/outer/inner\n", "utf-8")
    (tmp_path / "cgroup" / "outer" / "inner").mkdir(parents=True)
    return tmp_path


def limit(folder: Path, maximum: str, current: int, file_pages: int = 0) -> None:
    (folder / "memory.max").write_text(f"{maximum}\n", "utf-8")
    (folder / "memory.current").write_text(f"{current}\n", "utf-8")
    stat = f"anon 1\ninactive_file {file_pages}\nactive_file 0\n"
    (folder / "memory.stat").write_text(stat, "utf-8")


def available(machine: Path) -> int:
    return available_host_bytes(machine / "proc", machine / "cgroup")


def test_without_limits_it_is_what_the_kernel_says(machine: Path) -> None:
    assert available(machine) == 64 * GIB
    limit(machine / "cgroup" / "outer" / "inner", "max", GIB)
    assert available(machine) == 64 * GIB


@pytest.mark.parametrize("folder", ["outer", "outer/inner"])
def test_limit_of_any_cgroup_around_the_process(machine: Path, folder: str) -> None:
    limit(machine / "cgroup" / folder, str(32 * GIB), 10 * GIB, file_pages=6 * GIB)
    assert available(machine) == 28 * GIB
    limit(machine / "cgroup" / folder, str(GIB), 2 * GIB)
    assert available(machine) == 0


def test_cgroup_version_1(machine: Path) -> None:
    cgroup = "5:cpu:/x\n4:memory,hugetlb:/job\n"
    (machine / "proc" / "self" / "cgroup").write_text(cgroup, "utf-8")
    job = machine / "cgroup" / "memory" / "job"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text(str(8 * GIB), "utf-8")
    (job / "memory.usage_in_bytes").write_text(str(3 * GIB), "utf-8")
    (job / "memory.stat").write_text("cache 5\n", "utf-8")
    assert available(machine) == 5 * GIB
    (job / "memory.limit_in_bytes").write_text("9223372036854771712", "utf-8")
    assert available(machine) == 64 * GIB


def test_this_machine() -> None:
    assert 2**20 < available_host_bytes() < 2**50


MEASURE = """
import sys, threading, time
from pathlib import Path
from seqmoe_weights.convert import convert

def anonymous_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous_kib())
        time.sleep(0.0005)

source, target, quantize = sys.argv[1:]
before = peak = anonymous_kib()
done = False
thread = threading.Thread(target=watch)
thread.start()
convert(Path(source), Path(target), quantize, False)
done = True
thread.join()
print((peak - before) * 1024)
"""


@pytest.mark.parametrize("quantize", ["keep", "fp8"])
def test_a_conversion_takes_a_few_records_and_one_tensor(tmp_path: Path, quantize: str) -> None:
    """A checkpoint of 128 MiB: 48 records of 1.5 MiB and an embedding of 32 MiB, twice."""
    source = write_checkpoint(
        tmp_path / "source",
        "olmoe",
        hidden_size=512,
        moe_intermediate_size=512,
        num_experts=24,
        num_hidden_layers=2,
        vocab_size=2**15,
    )
    record_bytes, embedding_bytes = 3 * 2 * 512 * 512, 2 * 512 * 2**15
    size = (source / "model.safetensors").stat().st_size
    bound = 8 * record_bytes + embedding_bytes // 4
    assert size > 6 * bound
    command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "packed"), quantize]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) < bound
