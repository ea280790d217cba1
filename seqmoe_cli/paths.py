"""Where files live: XDG folders, all of them moved by SEQMOE_HOME; the Hugging Face cache."""

from __future__ import annotations

import os
from pathlib import Path


def _base(variable: str, fallback: str) -> Path:
    home = os.environ.get("SEQMOE_HOME")
    if home:
        return Path(home)
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / fallback) / "seqmoe"


def models_dir() -> Path:
    """Default place of packed models."""
    return _base("XDG_DATA_HOME", ".local/share") / "models"


def history_file() -> Path:
    """Lines typed at the chat prompt; readable by the user alone."""
    return _base("XDG_STATE_HOME", ".local/state") / "history"


def profiles_dir() -> Path:
    """Which experts the user's answers have used, a file for each model."""
    return _base("XDG_STATE_HOME", ".local/state") / "profiles"


def hf_cache_dir() -> Path:
    """Where `huggingface_hub` keeps downloaded repositories; only ever read."""
    hub = os.environ.get("HF_HUB_CACHE")
    if hub:
        return Path(hub)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"
