"""Environment variables that torch reads when it is imported."""

from __future__ import annotations

import os
import sys


def prepare_torch() -> None:
    """Set what suits a program that computes one answer at a time; what the user has set stays."""
    # Threads that wait by spinning take the cores from each other on a busy machine; a token then
    # costs ten times as much.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Prompts of all lengths leave holes of all sizes in segments of a fixed size: in an hour of
    # chat, gigabytes of device memory that no tensor holds.
    if sys.platform == "linux":
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
