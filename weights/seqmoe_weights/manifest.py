"""manifest.json: what a packed model consists of. Written last: where it is, all is."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seqmoe_weights.errors import PackedModelError
from seqmoe_weights.files import FileHashes
from seqmoe_weights.layout import RecordLayout

MANIFEST_FILE = "manifest.json"
JOURNAL_FILE = ".convert.json"
RESIDENT_FILE = "resident.safetensors"
FORMAT, FORMAT_VERSION = "seqmoe", 1
REQUIRED_FILES = ("config.json", "tokenizer.json")
COPIED_FILES = (
    *REQUIRED_FILES,
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)
_PLAIN_FIELDS: dict[str, type] = {
    "family": str,
    "quantize": str,
    "dense_format": str,
    "num_layers": int,
    "num_experts": int,
}
_HINT = "run seqmoe convert again with --force, or restore the file"


def experts_file(layer: int) -> str:
    """Name of the file that holds the records of one layer."""
    return f"experts-{layer:05d}.bin"


def is_experts_file(name: str) -> bool:
    """Whether `experts_file` gives names like this one."""
    return re.fullmatch(r"experts-\d{5}\.bin", name) is not None


def is_predictor_file(name: str) -> bool:
    """Whether `attach_predictor` gives names like this one."""
    return re.fullmatch(r"predictor-[0-9a-f]{16}\.safetensors", name) is not None


@dataclass(frozen=True)
class Manifest:
    """Describes and seals a packed model.

    `dense_format` is how its linear layers outside the experts are stored; `layout` is what
    `layouts_as_json` gives; `source` maps each packed file to the SHA-256 over the source tensors
    it was made from, and `source_sha256` sums up all of them together with the copied files.
    """

    family: str
    quantize: str
    dense_format: str
    num_layers: int
    num_experts: int
    layout: Any
    files: dict[str, FileHashes]
    source: dict[str, str]
    source_sha256: str

    def as_json(self) -> dict[str, Any]:
        """Everything, and under `sha256` a hash over it."""
        value = {name: getattr(self, name) for name in _PLAIN_FIELDS} | {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "layout": self.layout,
            "files": {name: hashes.as_json() for name, hashes in self.files.items()},
            "source": {"files": self.source, "sha256": self.source_sha256},
        }
        return value | {"sha256": seal(value)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Manifest:
        """Raises `PackedModelError` for another format or version, or a malformed field."""
        if value.get("format") != FORMAT:
            raise PackedModelError(f"{MANIFEST_FILE} is not one of seqmoe", "give a packed model")
        version = value.get("format_version")
        if version != FORMAT_VERSION or isinstance(version, bool):
            raise PackedModelError(
                f"{MANIFEST_FILE}: format_version {version!r} is not supported, only "
                f"{FORMAT_VERSION} is",
                "use the seqmoe that made it, or convert the model again with --force",
            )
        try:
            if value["sha256"] != seal(value):
                raise ValueError("wrong SHA-256")
            return cls(
                **{name: _typed(value[name], kind) for name, kind in _PLAIN_FIELDS.items()},
                layout=value["layout"],
                files=_files(value["files"]),
                source={name: _typed(s, str) for name, s in value["source"]["files"].items()},
                source_sha256=_typed(value["source"]["sha256"], str),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise PackedModelError(f"{MANIFEST_FILE} is damaged ({error})", _HINT) from error


def seal(value: dict[str, Any]) -> str:
    """SHA-256 over a manifest but for its own `sha256`."""
    sealed = {name: item for name, item in value.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The parsed manifest.json of a folder, None without one; `PackedModelError` if not JSON."""
    try:
        value = json.loads((folder / MANIFEST_FILE).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError, OSError) as error:
        raise PackedModelError(
            f"{MANIFEST_FILE} in {folder} is not readable JSON ({error})", _HINT
        ) from error
    if not isinstance(value, dict):
        raise PackedModelError(f"{MANIFEST_FILE} in {folder} is not a JSON object", _HINT)
    return value


def _files(value: dict[str, Any]) -> dict[str, FileHashes]:
    for name in (*REQUIRED_FILES, *value):
        if name not in value:
            raise KeyError(name)
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not a file name")
    return {name: FileHashes.from_json(entry) for name, entry in value.items()}


def layouts_as_json(layouts: Sequence[RecordLayout]) -> Any:
    """The record of each layer; one for all of them when they are the same."""
    values = [_layout_as_json(layout) for layout in layouts]
    return values[0] if all(value == values[0] for value in values) else values


def _layout_as_json(layout: RecordLayout) -> dict[str, Any]:
    parts = [asdict(part) | {"shape": list(part.shape)} for part in layout.parts]
    value = {"parts": parts, "record_bytes": layout.record_bytes}
    return value if layout.format == layout["gate"].dtype else value | {"format": layout.format}


def formats_in(layout: Any, num_layers: int) -> list[str]:
    """The format of each layer, out of what `layouts_as_json` gave. Raises `LookupError`,
    `TypeError` or `AttributeError` for anything else."""
    layers = layout if isinstance(layout, list) else [layout] * num_layers
    return [layer.get("format", layer["parts"][0]["dtype"]) for layer in layers]


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    return value
