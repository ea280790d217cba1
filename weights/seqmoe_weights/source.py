"""A Hugging Face checkpoint on disk: config, tokenizer files, tensors, all checked before use."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from seqmoe_weights.config import ModelConfig
from seqmoe_weights.errors import CheckpointError, either
from seqmoe_weights.families import TensorSpec, find_family, read_config, scale_spec
from seqmoe_weights.fields import Fields
from seqmoe_weights.layout import StoredTensor, bytes_of
from seqmoe_weights.manifest import COPIED_FILES, REQUIRED_FILES

_PLAIN_DTYPES = ("BF16", "F16", "F32")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# A value is NaN or infinite when all of these bits are set (E4M3 has no infinity).
_NOT_FINITE: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F8_E4M3": (np.uint8, 0x7F),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
}
_CHECK_CODES = 2**20  # at a time, so that the check takes little memory


@dataclass(frozen=True)
class SourceTensor(StoredTensor):
    """A tensor of the checkpoint and the name of its file."""

    file: str


class TensorDigest:
    """SHA-256 over names, dtypes, shapes and data of tensors, in whatever order they were read."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, tensor: SourceTensor, data: torch.Tensor) -> None:
        content = hashlib.sha256(bytes_of(data)).hexdigest()
        self._lines.append(f"{tensor.name} {tensor.dtype} {list(tensor.shape)} {content}\n")

    def hexdigest(self) -> str:
        return hashlib.sha256("".join(sorted(self._lines)).encode()).hexdigest()


class Source:
    """A checkpoint folder. Tensors are read one at a time, out of mapped files.

    `small_files` holds the files that are copied as they are: name -> content.
    """

    def __init__(self, path: Path) -> None:
        """Read config, small files and every header. Raises `CheckpointError`, naming file, field
        or tensor, and `UnsupportedError`."""
        self.path = path
        self.small_files = _read_small_files(path)
        raw = _parse_object(self.small_files["config.json"], "config.json")
        self.config: ModelConfig = read_config(raw)
        self.family = find_family(self.config.family)
        self._plain_modules = _plain_modules(raw)
        self._files: dict[str, Any] = {}
        self.tensors = self._read_headers()

    def fingerprint(self) -> dict[str, Any]:
        """Tells this source from another one quickly, without reading the tensors."""
        marks: dict[str, Any] = {
            name: hashlib.sha256(data).hexdigest() for name, data in self.small_files.items()
        }
        for name in sorted(self._files):
            status = (self.path / name).stat()
            marks[name] = [status.st_size, status.st_mtime_ns, _header_hash(self.path / name)]
        return marks

    def resolve(self, spec: TensorSpec) -> tuple[SourceTensor, SourceTensor | None]:
        """The tensor of `spec` and, when it is FP8, that of its scales.

        Raises `CheckpointError` when one is missing or contradicts the config.
        """
        tensor = self._find(spec)
        scale = scale_spec(spec) if spec.quantized else None
        if scale is None or self.config.dense_format != "FP8" or not self._is_converted(spec):
            _check_dtype(tensor, _PLAIN_DTYPES)
            if scale is not None and scale.name in self.tensors:
                raise _contradiction(self.tensors[scale.name], f"{tensor.name} is not FP8")
            return tensor, None
        _check_dtype(tensor, ("F8_E4M3",))
        scales = self._find(scale)
        _check_dtype(scales, ("BF16", "F32"))
        return tensor, scales

    def read(self, tensor: SourceTensor, digest: TensorDigest) -> torch.Tensor:
        """The tensor's data, mapped rather than copied; added to `digest`.

        Raises `CheckpointError` when a value is not finite.
        """
        try:
            data: torch.Tensor = self._files[tensor.file].get_tensor(tensor.name)
        except (SafetensorError, OSError) as error:
            raise _damaged(
                f"{tensor.file}: tensor {tensor.name} cannot be read ({error})"
            ) from error
        if not _is_finite(data, tensor.dtype):
            raise _damaged(f"{tensor.file}: tensor {tensor.name} holds NaN or infinite values")
        digest.add(tensor, data)
        return data

    def _read_headers(self) -> dict[str, SourceTensor]:
        tensors: dict[str, SourceTensor] = {}
        for file, wanted in _shards(self.path).items():
            present = self._open(file)
            for name in wanted if wanted is not None else present:
                if name not in present:
                    raise _damaged(f"{file}: tensor {name} is missing")
                tensors[name] = present[name]
        return tensors

    def _open(self, file: str) -> dict[str, SourceTensor]:
        path = self.path / file
        if not path.is_file():
            raise _damaged(f"{file} is missing in {self.path}")
        try:
            handle: Any = safe_open(path, framework="pt")
            self._files[file] = handle
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return {
                name: SourceTensor(name, piece.get_dtype(), tuple(piece.get_shape()), file)
                for name, piece in slices.items()
            }
        except (SafetensorError, OSError) as error:
            raise _damaged(f"{file} cannot be read ({error})") from error

    def _find(self, spec: TensorSpec) -> SourceTensor:
        tensor = self.tensors.get(spec.name)
        if tensor is None:
            where = _INDEX if len(self._files) > 1 else next(iter(self._files))
            raise _damaged(f"{where}: tensor {spec.name} is missing")
        if tensor.shape != spec.shape:
            raise _contradiction(tensor, f"shape {list(tensor.shape)}, not {list(spec.shape)}")
        return tensor

    def _is_converted(self, spec: TensorSpec) -> bool:
        """Whether the weight is FP8: neither its module nor one around it is to stay plain, be it
        named in full or by its end."""
        words = spec.name.removesuffix(".weight").split(".")
        names = {".".join(words[:end]) for end in range(1, len(words) + 1)}
        names |= {".".join(words[start:]) for start in range(len(words))}
        return names.isdisjoint(self._plain_modules)


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(what, "the checkpoint is damaged or incomplete; download it again")


def _read_small_files(path: Path) -> dict[str, bytes]:
    names = [name for name in COPIED_FILES if (path / name).exists()]
    names += sorted(file.name for file in path.glob("LICENSE*") if file.is_file())
    for required in REQUIRED_FILES:
        if required not in names:
            raise CheckpointError(
                f"{required} is missing in {path}", "SRC must be a Hugging Face checkpoint folder"
            )
    try:
        files = {name: (path / name).read_bytes() for name in names}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error.strerror})") from error
    for name, data in files.items():
        if name.endswith(".json"):
            _parse_object(data, name)
    if not isinstance(_parse_object(files["tokenizer.json"], "tokenizer.json").get("model"), dict):
        raise _damaged("tokenizer.json: field model is missing or not an object")
    try:
        files.get("chat_template.jinja", b"").decode()
    except UnicodeDecodeError as error:
        raise _damaged(f"chat_template.jinja is not UTF-8 ({error})") from error
    return files


def _parse_object(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise _damaged(f"{name} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise _damaged(f"{name} is not a JSON object")
    return value


def _plain_modules(raw: dict[str, Any]) -> set[str]:
    quantization = Fields(raw).nested("quantization_config")
    return set(quantization.texts("modules_to_not_convert")) if quantization is not None else set()


def _shards(path: Path) -> Mapping[str, list[str] | None]:
    """Weight files and the tensors to take from each; None means all that it holds."""
    if (path / _INDEX).is_file():
        index = _parse_object((path / _INDEX).read_bytes(), _INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise _damaged(f"{_INDEX}: field weight_map is missing or empty")
        shards: dict[str, list[str]] = {}
        for tensor, file in sorted(index.items()):
            if not isinstance(file, str) or os.path.basename(file) != file:
                raise _damaged(f"{_INDEX}: {tensor} is in {file!r}, no file name")
            shards.setdefault(file, []).append(tensor)
        return shards
    if not (path / _SINGLE).is_file():
        raise CheckpointError(
            f"neither {_SINGLE} nor {_INDEX} is in {path}",
            "only safetensors checkpoints can be converted",
        )
    return {_SINGLE: None}


def _header_hash(path: Path) -> str:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return hashlib.sha256(file.read(size)).hexdigest()


def _check_dtype(tensor: SourceTensor, allowed: tuple[str, ...]) -> None:
    if tensor.dtype not in allowed:
        raise _contradiction(tensor, f"dtype {tensor.dtype}, not {either(allowed)}")


def _contradiction(tensor: SourceTensor, what: str) -> CheckpointError:
    return _damaged(f"{tensor.file}: tensor {tensor.name} contradicts config.json: {what}")


def _is_finite(data: torch.Tensor, dtype: str) -> bool:
    code, mask = _NOT_FINITE[dtype]
    codes = np.frombuffer(bytes_of(data), code)
    starts = range(0, len(codes), _CHECK_CODES)
    return not any(((codes[i : i + _CHECK_CODES] & mask) == mask).any() for i in starts)
