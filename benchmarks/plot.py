"""The residency curve as a picture: decode speed against the share of experts in the pool.

    python benchmarks/plot.py FILES.json -o docs/residency.png

A file is the output of `seqmoe bench -o json`, or a record of `make gpu-check`. Each model and
routing is a line. Needs matplotlib: pip install 'seqmoe[plot]'.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

Rows = list[dict[str, Any]]


class Point(NamedTuple):
    """One row: percent of all experts that the pool holds, tokens per second."""

    share: float
    rate: float
    deviation: float


def read_rows(path: Path) -> Rows:
    """The rows of a file."""
    content = json.loads(path.read_text("utf-8"))
    rows: Rows = content if isinstance(content, list) else content["full-size"]["rows"]
    return rows


def curves(rows: Iterable[dict[str, Any]]) -> dict[str, list[Point]]:
    """The points of each line, by its name, from small pools to large ones. Of generated tokens
    without a replayed trace, the rows with a warm pool count."""
    lines: dict[str, list[Point]] = defaultdict(list)
    for row in rows:
        if row["n_gen"] and (row["trace"] or row["state"] == "warm"):
            point = Point(100 * row["pool_share"], row["avg_ts"], row["stddev_ts"])
            lines[_name(row)].append(point)
    return {name: sorted(points) for name, points in sorted(lines.items())}


def _name(row: dict[str, Any]) -> str:
    routing = f"routing of trace {row['trace']}" if row["trace"] else "its own routing"
    weights = "random weights, " if row["weights"] == "random" else ""
    machine = row["gpu_info"] or row["cpu_info"]
    details = f"{row['test']}, {row['policy']}, prefetch {row['prefetch']}, {machine}"
    return f"{row['model_filename']}, {weights}{routing} ({details})"


def draw(lines: dict[str, list[Point]], target: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, points in lines.items():
        shares, rates, deviations = zip(*points, strict=True)
        axes.errorbar(shares, rates, yerr=deviations, marker="o", capsize=3, label=name)
    highest = max(point.rate + point.deviation for points in lines.values() for point in points)
    axes.set(xlabel="experts in the pool, %", ylabel="tokens per second")
    axes.set(xlim=(0, 102), ylim=(0, 1.1 * highest))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(target, dpi=150)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the PNG to write")
    args = parser.parse_args()
    try:
        lines = curves(row for path in args.files for row in read_rows(path))
        if not lines:
            raise ValueError("no rows of generated tokens")
        draw(lines, args.output)
    except ImportError:
        print("plot.py: needs matplotlib: pip install 'seqmoe[plot]'", file=sys.stderr)
        return 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"plot.py: {' '.join(map(str, args.files))}: {error}", file=sys.stderr)
        print(
            "  give the output of seqmoe bench -o json, or a record of gpu-check", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
