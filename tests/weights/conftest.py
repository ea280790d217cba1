"""Fixtures of the tests of seqmoe_weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def quick_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test cuts the power, and waiting for the disk is most of what a tiny conversion does."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def copy_checkpoint(tmp_path: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Like `checkpoint`, but a copy at `tmp_path / "source"` that the test may change."""

    def copy(family: str, **options: Any) -> Path:
        return shutil.copytree(checkpoint(family, **options), tmp_path / "source")

    return copy
