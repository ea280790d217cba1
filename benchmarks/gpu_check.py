"""`make gpu-check`: GPU tests and a short bench on this machine, recorded as JSON.

Runs with any python that has torch with CUDA, Triton and the packages of pyproject.toml; nothing
is installed or downloaded. Writes benchmarks/gpu/<date>-<gpu>-<commit>.json: machine, versions, the
commit, how many tests passed, kernel rates, the demo model's text on CPU and GPU, and the rows of
`seqmoe bench` for a full-size model made of random weights, with its own routing and with that of a
recorded trace, with every policy and kind of prefetch. Exits 1 when anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "weights")]

import torch  # noqa: E402

from benchmarks import demo_text, forecast_levels, kernels, random_model  # noqa: E402
from seqmoe_cli.bench.machine import machine_facts  # noqa: E402

PARTS = ("tests", "kernels", "demo", "full-size", "forecast")


TEST_PROCESSES = 6  # side by side: most of the time goes into compiling kernels
NO_TESTS = 5  # pytest's exit code when no test of a file is marked `gpu`


def run_tests() -> dict[str, Any]:
    """The tests marked `gpu`, each file in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]

    def run(file: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, str(file)], cwd=ROOT, capture_output=True, text=True)

    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with ThreadPoolExecutor(TEST_PROCESSES) as processes:
        for done in processes.map(run, sorted(ROOT.glob("tests/**/test_*.py"))):
            last = (done.stdout.strip().splitlines() or [""])[-1]
            for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last):
                counts[word] += int(number)
            if done.returncode not in (0, NO_TESTS):
                wrong += re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)
                print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    print(dict(counts), flush=True)
    return {"ok": not wrong, "command": " ".join(command[1:]), **counts, "wrong": wrong}


def run_part(name: str, part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One part of the check; a failure is recorded and does not stop the others."""
    print(f"== {name}", flush=True)
    started = time.perf_counter()
    try:
        result = {"ok": True, "command": f"benchmarks/gpu_check.py --only {name}", **part()}
    except Exception as error:
        import traceback

        traceback.print_exc()
        result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    result["seconds"] = round(time.perf_counter() - started, 1)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="run just this part")
    parser.add_argument("--demo", type=Path, default=ROOT / ".demo/smollm2-sparse")
    forecast_levels.add_arguments(parser)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/gpu")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-check: no usable CUDA device (see `seqmoe doctor`)", file=sys.stderr)
        return 1
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "tests": run_tests,
        "kernels": kernels.bench,
        "demo": lambda: demo_text.compare(args.demo),
        "full-size": random_model.bench,
        "forecast": lambda: forecast_levels.bench(args.demo, tuple(args.replay), keep, args.pools),
    }
    machine = machine_facts("cuda")
    commit = machine.pop("build_commit")
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "command": "make gpu-check",
        "python": sys.version.split()[0],
        **machine,
    }
    gpu = re.sub(r"[^a-z0-9]+", "-", machine["gpu_info"].lower()).strip("-")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{record['date']}-{gpu}-{commit[:9]}.json"

    def write() -> None:
        path.write_text(json.dumps(record, indent=2) + "\n")  # what is known, come what may

    def keep(found: dict[str, Any]) -> None:
        """What there is of a part that may be stopped."""
        record["forecast"] = {"ok": False, **found}
        write()

    for name in args.only or PARTS:
        record[name] = {**record.get(name, {}), **run_part(name, parts[name])}
        write()
    print(f"wrote {path}")
    return 0 if all(record[name]["ok"] for name in args.only or PARTS) else 1


if __name__ == "__main__":
    sys.exit(main())
