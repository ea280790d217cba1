"""Files that appear whole or not at all, hashes of their pieces, and errors that name them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from seqmoe_weights.errors import ResourceError, SeqmoeError

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes)."""
Data = bytes | memoryview

PART_SUFFIX = ".part"  # of a file that is being written
_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class FileHashes:
    """Size of a file and the SHA-256 of its pieces, which are of equal size: one per record for a
    file of experts, otherwise one for the whole file."""

    num_bytes: int
    pieces: tuple[str, ...]

    @property
    def piece_bytes(self) -> int:
        return self.num_bytes // len(self.pieces)

    def as_json(self) -> dict[str, Any]:
        return {"bytes": self.num_bytes, "sha256": list(self.pieces)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> FileHashes:
        """Raises `ValueError` for anything that `as_json` does not write."""
        num_bytes, pieces = value.get("bytes"), value.get("sha256")
        if not isinstance(num_bytes, int) or not isinstance(pieces, list) or not pieces:
            raise ValueError("bytes or sha256")
        if num_bytes % len(pieces) or not all(isinstance(piece, str) for piece in pieces):
            raise ValueError("sha256")
        return cls(num_bytes, tuple(pieces))

    @classmethod
    def of_bytes(cls, data: bytes) -> FileHashes:
        return cls(len(data), (hashlib.sha256(data).hexdigest(),))


class Meter:
    """Counts bytes towards a total and reports them."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self.total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress

    def add(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self.total_bytes)


def first_bad_piece(path: Path, hashes: FileHashes, meter: Meter) -> int | None:
    """Index of the first piece of `path` that is missing or not what it was; None when intact."""
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, hashes.piece_bytes)))
    with path.open("rb") as file:
        for index, expected in enumerate(hashes.pieces):
            digest = hashlib.sha256()
            for start in range(0, hashes.piece_bytes, _CHUNK_BYTES):
                count = file.readinto(buffer[: hashes.piece_bytes - start])
                digest.update(buffer[:count])
                meter.add(count)
            if digest.hexdigest() != expected:
                return index
        return len(hashes.pieces) - 1 if file.read(1) else None


def is_intact(path: Path, hashes: FileHashes, meter: Meter | None = None) -> bool:
    """Whether the file is there, can be read and is what was written."""
    try:
        return first_bad_piece(path, hashes, meter or Meter(0, None)) is None
    except OSError:
        return False


def write_pieces(file: BinaryIO, pieces: Iterable[Iterable[Data]], meter: Meter) -> FileHashes:
    """Write pieces of equal size, each in parts as they come; returns their hashes."""
    hashes: list[str] = []
    start = file.tell()
    for piece in pieces:
        digest = hashlib.sha256()
        for data in piece:
            part = memoryview(data)
            for first in range(0, len(part), _CHUNK_BYTES):
                chunk = part[first : first + _CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
                meter.add(len(chunk))
        hashes.append(digest.hexdigest())
    return FileHashes(file.tell() - start, tuple(hashes))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write `path` under a temporary name; it gets its own when it is whole and on the disk.

    The new name itself is on the disk after `sync_folder`.
    """
    part = path.with_name(path.name + PART_SUFFIX)
    with naming_os_errors("write", path):
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


def write_file(path: Path, data: bytes) -> None:
    """Write a file with all of its content at once; see `replacing`."""
    with replacing(path) as file:
        file.write(data)


def write_json(path: Path, value: object) -> None:
    """The same value gives the same bytes."""
    write_file(path, json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")


def sync_folder(path: Path) -> None:
    """Make renames and removals within the folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_disk_bytes(path: Path) -> int:
    """What an ordinary user may still write at `path`, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


@contextmanager
def naming_os_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into an error that says what could not be done, and with which file."""
    try:
        yield
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else path
        message = f"cannot {action} {name}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                message, "free disk space and run the same command again"
            ) from error
        raise SeqmoeError(message, "check that the path exists and that you may use it") from error


def readable_size(num_bytes: float) -> str:
    """A size for people, in GiB, or MiB when it is small."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:,.2f} GiB"
