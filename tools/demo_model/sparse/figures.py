"""The figures of a training as Markdown: `python -m tools.demo_model.sparse.figures RESULTS`, which
is the results.json that the training writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHARES = (0, 25, 50, 75, 100)  # percentiles of the experts of a layer


def page(results: dict[str, Any]) -> Iterator[str]:
    """The lines of both tables."""
    teacher, student = (results["perplexity"][name] for name in ("teacher", "student"))
    yield "| held-out text | dense | sparse | ratio |"
    yield "|---|---:|---:|---:|"
    for kind, dense in teacher.items():
        sparse = student[kind]
        yield f"| {kind} | {dense:.2f} | {sparse:.2f} | {sparse / dense:.3f} |"
    load = np.array(results["load"])
    yield from ("", "| layer | least used | 1st quartile | median | 3rd quartile | most used |")
    yield "|---:|---:|---:|---:|---:|---:|"
    for layer, cells in enumerate(np.percentile(load, SHARES, axis=1).T):
        yield f"| {layer} | {' | '.join(f'{value:.2f}' for value in cells)} |"
    yield from ("", f"Over all layers: least {load.min():.2f}, most {load.max():.2f}.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.demo_model.sparse.figures RESULTS")
    print("\n".join(page(json.loads(Path(sys.argv[1]).read_text("utf-8")))))
