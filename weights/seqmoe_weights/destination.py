"""The folder that a conversion writes: what it holds already, and what may be done with it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seqmoe_weights.errors import PackedModelError, SeqmoeError
from seqmoe_weights.files import PART_SUFFIX, FileHashes, sync_folder, write_json
from seqmoe_weights.manifest import (
    COPIED_FILES,
    FORMAT,
    JOURNAL_FILE,
    MANIFEST_FILE,
    RESIDENT_FILE,
    Manifest,
    is_experts_file,
    is_predictor_file,
    read_manifest,
)

_OWN_NAMES = {MANIFEST_FILE, JOURNAL_FILE, RESIDENT_FILE, *COPIED_FILES}


@dataclass
class Journal:
    """What an unfinished conversion has done: settings, source, finished files.

    `sources` holds the digest, per finished file, of the source tensors it was made from.
    """

    quantize: str
    fingerprint: dict[str, Any]
    finished: dict[str, FileHashes] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        finished = {name: hashes.as_json() for name, hashes in self.finished.items()}
        value = vars(self) | {"format": f"{FORMAT}-conversion", "finished": finished}
        write_json(folder / JOURNAL_FILE, value)

    @classmethod
    def read(cls, folder: Path) -> Journal | None:
        """None when there is none, or it is none of ours."""
        try:
            value = json.loads((folder / JOURNAL_FILE).read_text("utf-8"))
            if value["format"] != f"{FORMAT}-conversion":
                return None
            finished = {n: FileHashes.from_json(e) for n, e in value["finished"].items()}
            return cls(value["quantize"], value["fingerprint"], finished, value["sources"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def copies(self) -> set[str]:
        """Names of the files that are copied as they are."""
        return {name for name, mark in self.fingerprint.items() if isinstance(mark, str)}


@dataclass
class Destination:
    """A folder, perhaps not there yet. `manifest` is set when it holds a whole packed model,
    `journal` when it holds an unfinished one; `is_damaged` when it is ours but unreadable."""

    path: Path
    manifest: Manifest | None = None
    journal: Journal | None = None
    is_damaged: bool = False
    own_files: list[Path] = field(default_factory=list)
    foreign_files: list[Path] = field(default_factory=list)

    @classmethod
    def inspect(cls, path: Path) -> Destination:
        """Raises `SeqmoeError` when `path` is a file, or a folder that is not ours."""
        if path.is_symlink() and not path.exists():
            raise SeqmoeError(f"{path} is a broken link", "give another DST")
        if path.exists() and not path.is_dir():
            raise SeqmoeError(f"{path} is a file, not a folder", "give another DST")
        found = cls(path, journal=Journal.read(path))
        if not path.exists():
            return found
        listed = found._read_manifest() | (found.journal.copies if found.journal else set())
        for entry in sorted(path.iterdir()):
            own = entry.is_file() and _is_own(entry.name, listed)
            (found.own_files if own else found.foreign_files).append(entry)
        is_ours = found.is_damaged or found.manifest is not None or found.journal is not None
        names = {entry.name for entry in found.own_files}
        holds_weights = any(name == RESIDENT_FILE or is_experts_file(name) for name in names)
        if not is_ours and not found.foreign_files and holds_weights:
            is_ours = found.is_damaged = True  # packed, but for a manifest that can be read
        names |= {entry.name for entry in found.foreign_files}
        if not is_ours and names - {JOURNAL_FILE + PART_SUFFIX}:
            raise SeqmoeError(
                f"{path} is not empty and holds no packed model",
                "give a new or empty folder as DST; nothing in it was touched",
            )
        return found

    def _read_manifest(self) -> set[str]:
        """Read what there is of a manifest; the names of the files that it lists."""
        try:
            raw = read_manifest(self.path) or {}
        except PackedModelError:
            return set()
        if raw.get("format") != FORMAT:
            return set()
        try:
            self.manifest = Manifest.from_json(raw)
        except PackedModelError:
            self.is_damaged = True
        files = raw.get("files")
        return set(files) if isinstance(files, dict) else set()

    def refuse_foreign_files(self) -> None:
        """Nothing that somebody else put there is deleted or mixed with another model."""
        if self.foreign_files:
            raise SeqmoeError(
                f"{self.path} also holds {self.foreign_files[0].name}, which seqmoe convert did "
                "not write",
                "move it away or give another DST",
            )

    def remove_all_but(self, kept: set[str]) -> None:
        """Remove files of ours, the manifest before anything else: without it nothing loads."""
        for file in sorted(self.own_files, key=lambda file: file.name != MANIFEST_FILE):
            if file.name not in kept:
                file.unlink(missing_ok=True)
        sync_folder(self.path)


def _is_own(name: str, listed: set[str]) -> bool:
    plain = name.removesuffix(PART_SUFFIX)
    is_listed = plain in listed | _OWN_NAMES
    return is_listed or is_experts_file(plain) or is_predictor_file(plain)
