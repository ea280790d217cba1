"""resident.safetensors: everything that stays in VRAM, written one tensor at a time."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from seqmoe_weights.errors import PackedModelError
from seqmoe_weights.files import FileHashes, Meter, first_bad_piece
from seqmoe_weights.layout import DTYPE_BYTES
from seqmoe_weights.records import bytes_of

RESIDENT_FILE = "resident.safetensors"
_HEADER_ALIGNMENT = 64
_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class ResidentTensor:
    """A tensor of the file; `dtype` is a safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def in_file_order(tensors: list[ResidentTensor]) -> list[ResidentTensor]:
    """Wide dtypes first, so that every tensor is aligned; then by name."""
    return sorted(tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))


def header_bytes(tensors: list[ResidentTensor]) -> bytes:
    """The start of a safetensors file that holds `tensors`, which are in file order.

    Written by hand, because the safetensors library wants all tensors in memory at once, and pads
    its header to 8 bytes: the files that are there already have other hashes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_resident(
    file: BinaryIO, tensors: list[ResidentTensor], data: Iterator[torch.Tensor], meter: Meter
) -> FileHashes:
    """Write `tensors`, whose `data` come in file order and in their final dtype."""
    header = header_bytes(tensors)
    digest = hashlib.sha256(header)
    file.write(header)
    meter.add(len(header))
    num_bytes = len(header)
    for tensor, values in zip(tensors, data, strict=True):
        raw = bytes_of(values)
        for start in range(0, len(raw), _CHUNK_BYTES):
            chunk = raw[start : start + _CHUNK_BYTES]
            digest.update(chunk)
            file.write(chunk)
            meter.add(len(chunk))
        num_bytes += tensor.num_bytes
    return FileHashes(num_bytes, (digest.hexdigest(),))


@contextmanager
def open_resident(path: Path, hashes: FileHashes, meter: Meter) -> Iterator[Any]:
    """The file as `safetensors.safe_open` gives it, after all of it has been read and hashed.
    Raises `PackedModelError` when it is not what was written."""
    try:
        bad = first_bad_piece(path, hashes, meter)
    except OSError:
        bad = 0
    if bad is not None:
        raise PackedModelError(
            f"{path.name} in {path.parent} is damaged (wrong SHA-256)",
            "convert the model again: seqmoe convert SRC DST repairs it",
        )
    with safe_open(path, framework="pt") as file:
        yield file
