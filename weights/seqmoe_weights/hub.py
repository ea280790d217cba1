"""Find a checkpoint that the Hugging Face tools have already downloaded. Never downloads."""

from __future__ import annotations

import re
from pathlib import Path

from seqmoe_weights.errors import CheckpointError

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_source(source: str, cache: Path) -> tuple[Path, str]:
    """The checkpoint folder that `source` means, and a name for it.

    `source` is a folder or a repo id `org/name`, whose `main` revision is looked up in the Hugging
    Face folder `cache`. Raises `CheckpointError` that says how to download it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path, _folder_name(path)
    if path.exists():
        raise CheckpointError(
            f"{source} is a file, not a checkpoint folder",
            "give the folder that holds config.json and the safetensors files",
        )
    if not _REPO_ID.fullmatch(source):
        raise CheckpointError(
            f"{source} does not exist", "give a checkpoint folder or a repo id such as org/name"
        )
    from huggingface_hub import snapshot_download  # here, because it takes long to import
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(source, cache_dir=cache, local_files_only=True)
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{source} is neither a folder nor in the Hugging Face cache {cache}",
            f"download it first: hf download {source}",
        ) from error
    return Path(snapshot), source.split("/")[1]


def _folder_name(path: Path) -> str:
    """The folder's own name; that of the repository for a snapshot in the Hugging Face cache."""
    path = path.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.split("--")[-1]
    return path.name
