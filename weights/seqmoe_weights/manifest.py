"""manifest.json: what a packed model consists of. Written last: where it is, all is."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from seqmoe_weights.errors import PackedModelError
from seqmoe_weights.files import FileHashes
from seqmoe_weights.layout import Part, RecordLayout

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

    `dense_format` is how its linear layers outside the experts are stored; `layouts` has the record
    of each layer, and is one in the file when they are all the same; `source` maps each
    packed file to the SHA-256 over the source tensors it was made from, and `source_sha256` sums
    up all of them together with the copied files.
    """

    family: str
    quantize: str
    dense_format: str
    num_layers: int
    num_experts: int
    layouts: tuple[RecordLayout, ...]
    files: dict[str, FileHashes]
    source: dict[str, str]
    source_sha256: str

    def as_json(self) -> dict[str, Any]:
        """Everything, and under `sha256` a hash over it."""
        layouts = [_layout_as_json(layout) for layout in self.layouts]
        are_equal = all(layout == layouts[0] for layout in layouts)
        value = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "family": self.family,
            "quantize": self.quantize,
            "dense_format": self.dense_format,
            "num_layers": self.num_layers,
            "num_experts": self.num_experts,
            "layout": layouts[0] if are_equal else layouts,
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
                family=_typed(value["family"], str),
                quantize=_typed(value["quantize"], str),
                dense_format=_typed(value["dense_format"], str),
                num_layers=_typed(value["num_layers"], int),
                num_experts=_typed(value["num_experts"], int),
                layouts=_layouts(value),
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
    for required in REQUIRED_FILES:
        if required not in value:
            raise KeyError(required)
    return {_file_name(name): FileHashes.from_json(entry) for name, entry in value.items()}


def _layout_as_json(layout: RecordLayout) -> dict[str, Any]:
    parts = [
        {"name": p.name, "dtype": p.dtype, "shape": list(p.shape), "offset": p.offset}
        for p in layout.parts
    ]
    value = {"parts": parts, "record_bytes": layout.record_bytes}
    return value if layout.format == layout["gate"].dtype else value | {"format": layout.format}


def _layouts(value: dict[str, Any]) -> tuple[RecordLayout, ...]:
    layout = value["layout"]
    if isinstance(layout, list):
        return tuple(_layout(layer) for layer in layout)
    num_layers = min(_typed(value["num_layers"], int), len(value["files"]))  # each has a file
    return (_layout(layout),) * max(1, num_layers)


def _layout(value: dict[str, Any]) -> RecordLayout:
    parts = tuple(
        Part(
            _typed(part["name"], str),
            _typed(part["dtype"], str),
            tuple(_typed(dim, int) for dim in part["shape"]),
            _typed(part["offset"], int),
        )
        for part in value["parts"]
    )
    format_name = value.get("format", value["parts"][0]["dtype"])
    return RecordLayout(parts, _typed(value["record_bytes"], int), _typed(format_name, str))


_T = TypeVar("_T")


def _typed(value: object, kind: type[_T]) -> _T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    return value


def _file_name(name: str) -> str:
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not a file name")
    return name
