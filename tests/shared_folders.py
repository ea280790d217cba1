"""Folders that are expensive to fill, made once for all processes of a test run."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


def made_once(folders: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """The folder `name`, filled by `build(folder)`: the process that asks first builds, others wait
    for it. No test may change what is in there. A build that failed is tried again."""
    root = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # each worker has a folder of its own in there
    place = root / "shared" / name
    finished = root / "shared" / f"{name}.finished"
    place.parent.mkdir(exist_ok=True)
    with FileLock(root / "shared" / f"{name}.lock"):
        if not finished.exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            build(place)
            finished.touch()
    return place


def name_of(kind: str, options: dict[str, Any]) -> str:
    """A file name of its own for each set of options."""
    told = f"{kind} {sorted(options.items())}"
    return f"{kind}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
