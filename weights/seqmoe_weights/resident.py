"""resident.safetensors: everything that stays in VRAM, written and read one tensor at a time."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from seqmoe_weights.errors import PackedModelError
from seqmoe_weights.files import FileHashes, Meter
from seqmoe_weights.layout import DTYPE_BYTES
from seqmoe_weights.records import TORCH_DTYPES, bytes_of

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
    """The start of a safetensors file that holds `tensors`, which are in file order."""
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


def read_resident(
    path: Path, hashes: FileHashes, meter: Meter
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the tensors one by one; `PackedModelError` at the latest after the last one when the
    file is not what was written. Use none of them before the iterator has ended."""
    digest = hashlib.sha256()
    damaged = PackedModelError(
        f"{path.name} in {path.parent} is damaged (wrong SHA-256)",
        "convert the model again: seqmoe convert SRC DST repairs it",
    )
    try:
        with path.open("rb", buffering=0) as file:
            prefix = _take(file, 8, digest)
            length = int.from_bytes(prefix, "little")
            if length > hashes.num_bytes:
                raise damaged
            header = json.loads(bytes(_take(file, length, digest)))
            meter.add(8 + length)
            for name, entry in header.items():
                if name != "__metadata__":
                    yield name, _read_tensor(file, entry, hashes.num_bytes, digest, meter)
            left = file.read(1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged from error
    if left or digest.hexdigest() != hashes.pieces[0]:
        raise damaged


def _read_tensor(
    file: Any, entry: dict[str, Any], limit: int, digest: Any, meter: Meter
) -> torch.Tensor:
    shape = [int(dim) for dim in entry["shape"]]
    num_bytes = math.prod(shape) * DTYPE_BYTES[entry["dtype"]]
    if not 0 <= num_bytes <= limit:
        raise ValueError("shape")
    data = torch.empty(num_bytes, dtype=torch.uint8)
    view = bytes_of(data)
    for start in range(0, num_bytes, _CHUNK_BYTES):
        chunk = view[start : start + _CHUNK_BYTES]
        _fill(file, chunk, digest)
        meter.add(len(chunk))
    return data.view(TORCH_DTYPES[entry["dtype"]]).view(shape)


def _take(file: Any, num_bytes: int, digest: Any) -> bytearray:
    data = bytearray(num_bytes)
    _fill(file, memoryview(data), digest)
    return data


def _fill(file: Any, view: memoryview, digest: Any) -> None:
    filled = 0
    while filled < len(view):
        count = file.readinto(view[filled:])
        if not count:
            raise ValueError("the file ends too early")
        filled += count
    digest.update(view)
