"""Packed models that a chat can be tested with."""

from __future__ import annotations

import json
from pathlib import Path

from seqmoe_weights.convert import convert
from tests.checkpoints import write_checkpoint


def endless_model(folder: Path, template: str | None = None) -> Path:
    """A tiny packed model that never ends an answer by itself; `template` replaces its own."""
    source = write_checkpoint(
        folder / "checkpoint", "qwen3_moe", eos_token_id=None, max_position_embeddings=32768
    )
    _edit(source / "generation_config.json", eos_token_id=None)
    if template is not None:
        _edit(source / "tokenizer_config.json", chat_template=template)
    convert(source, folder / "endless", "keep", False)
    return folder / "endless"


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
