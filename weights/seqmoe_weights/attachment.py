"""The predictor of a packed model: a safetensors file beside it that the manifest seals.

Its name holds its hash, so that a new one is written beside the old one and takes its place when
the manifest does. A model opens whatever state its predictor is in; loading a damaged
one is refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from seqmoe_weights.errors import PackedModelError
from seqmoe_weights.files import FileHashes, naming_os_errors, sync_folder, write_file, write_json
from seqmoe_weights.manifest import MANIFEST_FILE, Manifest, is_predictor_file, read_manifest

RETRAIN = "train it again: seqmoe train MODEL"
Tensors = dict[str, torch.Tensor]


def attach_predictor(folder: Path, tensors: Tensors, metadata: dict[str, str]) -> str:
    """Put a predictor into a packed model, in the place of an earlier one; returns the name of its
    file. Interrupted at any time, the model has the old one or the new one."""
    raw = read_manifest(folder)
    if raw is None:
        raise PackedModelError(f"{folder} is not a packed model", "run seqmoe convert first")
    manifest = Manifest.from_json(raw)
    data = to_bytes(tensors, metadata)
    name = f"predictor-{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
    with naming_os_errors("write", folder / name):
        write_file(folder / name, data)
        sync_folder(folder)
        files = {n: hashes for n, hashes in manifest.files.items() if not is_predictor_file(n)}
        files[name] = FileHashes.of_bytes(data)
        write_json(folder / MANIFEST_FILE, replace(manifest, files=files).as_json())
        for old in folder.iterdir():
            if is_predictor_file(old.name) and old.name != name:
                old.unlink(missing_ok=True)
        sync_folder(folder)
    return name


def to_bytes(tensors: Tensors, metadata: dict[str, str]) -> bytes:
    """A safetensors file."""
    return bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata))


def from_bytes(data: bytes, path: Path) -> tuple[Tensors, dict[str, str]]:
    """What `to_bytes` made; raises `PackedModelError` naming `path` for anything else."""
    try:
        tensors: Tensors = load(data)
        size = int.from_bytes(data[:8], "little")
        return tensors, json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    except (SafetensorError, ValueError) as error:
        raise PackedModelError(f"{path} is no predictor: {error}", RETRAIN) from error
