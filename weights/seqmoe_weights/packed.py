"""PackedModel: a finished packed folder, checked. Nothing damaged or unfinished gets past it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from seqmoe_weights.attachment import RETRAIN, from_bytes
from seqmoe_weights.config import ModelConfig
from seqmoe_weights.errors import PackedModelError, SeqmoeError
from seqmoe_weights.families import find_family, read_config
from seqmoe_weights.files import FileHashes, Meter, Progress, first_bad_piece, is_intact
from seqmoe_weights.layout import RecordLayout
from seqmoe_weights.manifest import (
    JOURNAL_FILE,
    MANIFEST_FILE,
    RESIDENT_FILE,
    Manifest,
    experts_file,
    formats_in,
    is_experts_file,
    is_predictor_file,
    layouts_as_json,
    read_manifest,
    seal,
)

_REPAIR = "run the same seqmoe convert SRC DST again: it repairs damaged files"


@dataclass(frozen=True)
class PackedModel:
    """A packed model on disk. `layouts` has one for each layer; `manifest` is the parsed
    manifest.json, `files` its hashes.

    Opening checks the small files fully and the presence and size of the large ones, whose hashes
    are checked whenever they are read. The predictor, if there is one, is checked when it is read.
    """

    path: Path
    config: ModelConfig
    layouts: tuple[RecordLayout, ...]
    manifest: dict[str, Any]
    files: dict[str, FileHashes]

    @classmethod
    def open(cls, path: Path) -> PackedModel:
        """Raises `PackedModelError`, naming the file, unless the folder is whole."""
        raw = read_manifest(path)
        if raw is None:
            raise _not_packed(path)
        manifest = Manifest.from_json(raw)
        needed = {n: h for n, h in manifest.files.items() if not is_predictor_file(n)}
        for name, hashes in needed.items():
            _check_presence(path / name, hashes)
        for name, hashes in needed.items():
            is_large = name == RESIDENT_FILE or is_experts_file(name)
            if not is_large and not is_intact(path / name, hashes):
                raise _damaged(path / name)
        config, layouts = _read_config(path, manifest)
        return cls(path, config, layouts, raw, manifest.files)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def weights_sha256(self) -> str:
        """Of the weights that it was made of: the same for all that is made of them, in whatever
        precision and with whatever tokenizer and settings."""
        return seal(self.manifest["source"]["files"])

    @property
    def record_bytes(self) -> int:
        """Size of a record, the same in all layers."""
        return self.layouts[0].record_bytes

    @property
    def resident_bytes(self) -> int:
        """Size of the file of resident tensors."""
        return self.files[RESIDENT_FILE].num_bytes

    @property
    def predictor(self) -> str | None:
        """Name of the file with the predictor; None without one."""
        return next((name for name in self.files if is_predictor_file(name)), None)

    @property
    def records_bytes(self) -> int:
        """Size of all records together."""
        return self.config.num_routed_experts * self.record_bytes

    @property
    def num_bytes(self) -> int:
        """Size of all weights."""
        return self.resident_bytes + self.records_bytes

    def records_file(self, layer: int) -> tuple[Path, FileHashes]:
        """The file with the records of `layer`, that of expert e at e * record_bytes."""
        name = experts_file(layer)
        return self.path / name, self.files[name]

    def load_resident(
        self,
        device: torch.device | str,
        compute_dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> dict[str, torch.Tensor]:
        """All resident tensors on `device`, under their Hugging Face names.

        FP8 weights stay torch.float8_e4m3fn, with their F32 scales under `<name>_scale_inv`;
        everything else comes in `compute_dtype`. Raises `PackedModelError` when the file is
        damaged.
        """
        tensors: dict[str, torch.Tensor] = {}
        with self._open_resident(progress) as file:
            for name in file.keys():  # noqa: SIM118
                data = file.get_tensor(name)
                keeps_dtype = data.dtype == torch.float8_e4m3fn or name.endswith("_scale_inv")
                tensors[name] = data.to(device, data.dtype if keeps_dtype else compute_dtype)
        return tensors

    def load_embedding(self) -> torch.Tensor:
        """The embedding [vocab_size, hidden_size] on the CPU, in its own dtype. Raises
        `PackedModelError` when the file is damaged."""
        specs = find_family(self.config.family).resident_tensors(self.config)
        name = next(spec.name for spec in specs if spec.role == "embedding")
        with self._open_resident() as file:
            embedding: torch.Tensor = file.get_tensor(name)
            return embedding

    def load_predictor(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Tensors and metadata of the predictor, on the CPU. Raises `PackedModelError` when there
        is none, or it is missing or damaged."""
        if self.predictor is None:
            raise PackedModelError(
                f"{self.path} has no predictor", "make one with: seqmoe train MODEL"
            )
        file = self.path / self.predictor
        try:
            data = file.read_bytes()
        except OSError as error:
            raise PackedModelError(f"{file.name} is missing in {self.path}", RETRAIN) from error
        if FileHashes.of_bytes(data) != self.files[file.name]:
            raise _damaged(file, hint=RETRAIN)
        return from_bytes(data, file)

    def verify(self, progress: Progress | None = None) -> None:
        """Read everything; raises `PackedModelError` naming file, layer and expert on damage."""
        meter = Meter(sum(hashes.num_bytes for hashes in self.files.values()), progress)
        layers = {experts_file(i): i for i in range(self.config.num_hidden_layers)}
        for name, hashes in sorted(self.files.items()):
            file = self.path / name
            try:
                bad = first_bad_piece(file, hashes, meter)
            except OSError as error:
                raise PackedModelError(f"{name} cannot be read: {error.strerror}") from error
            if bad is None:
                continue
            if is_predictor_file(name):
                self.load_predictor()  # raises
            raise damaged_record(file, layers[name], bad) if name in layers else _damaged(file)

    def _open_resident(self, progress: Progress | None = None) -> Any:
        """The file as `safetensors.safe_open` gives it, after all of it was read and hashed."""
        path, hashes = self.path / RESIDENT_FILE, self.files[RESIDENT_FILE]
        if not is_intact(path, hashes, Meter(self.resident_bytes, progress)):
            raise _damaged(path)
        return safe_open(path, framework="pt")


def _damaged(file: Path, what: str = "", hint: str = _REPAIR) -> PackedModelError:
    message = f"{file.name} in {file.parent} is damaged{what} (wrong SHA-256)"
    return PackedModelError(message, hint)


def damaged_record(file: Path, layer: int, expert: int) -> PackedModelError:
    """The error for a record whose bytes are not those that were written."""
    return _damaged(file, f": layer {layer}, expert {expert}")


def _check_presence(file: Path, hashes: FileHashes) -> None:
    try:
        num_bytes = file.stat().st_size
    except OSError as error:
        raise PackedModelError(f"{file.name} is missing in {file.parent}", _REPAIR) from error
    if num_bytes != hashes.num_bytes:
        raise PackedModelError(
            f"{file.name} in {file.parent} has {num_bytes} bytes, not {hashes.num_bytes}", _REPAIR
        )


def _read_config(path: Path, manifest: Manifest) -> tuple[ModelConfig, tuple[RecordLayout, ...]]:
    """config.json as a `ModelConfig`, and the layouts; the manifest must agree with them."""
    try:
        config = read_config(json.loads((path / "config.json").read_text("utf-8")))
        formats = formats_in(manifest.layout, config.num_hidden_layers)
        layouts = RecordLayout.for_layers(config.hidden_size, config.moe_intermediate_size, formats)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PackedModelError(
            f"{MANIFEST_FILE} in {path} is damaged ({error})", _REPAIR
        ) from error
    except SeqmoeError as error:
        raise PackedModelError(f"{path}: {error.message}", error.hint) from error
    counts = (config.family, config.num_hidden_layers, config.num_experts)
    same = (manifest.family, manifest.num_layers, manifest.num_experts) == counts
    same &= len(layouts) == config.num_hidden_layers
    same &= layouts_as_json(layouts) == manifest.layout
    pieces = {name: (len(file.pieces), file.piece_bytes) for name, file in manifest.files.items()}
    record = (config.num_experts, layouts[0].record_bytes)
    same &= all(pieces.get(experts_file(i)) == record for i in range(config.num_hidden_layers))
    if not same or pieces.get(RESIDENT_FILE, (0, 0))[0] != 1:
        raise PackedModelError(f"{MANIFEST_FILE} in {path} contradicts config.json", _REPAIR)
    return replace(config, dense_format=manifest.dense_format), layouts


def _not_packed(path: Path) -> PackedModelError:
    message = f"{path} is not a packed model (no {MANIFEST_FILE})"
    hint = "give the DST of a seqmoe convert"
    if not path.is_dir():
        message, hint = f"{path} is not a folder", "give the folder of a packed model"
    elif (path / JOURNAL_FILE).exists():
        message = f"{path} is an unfinished conversion"
        hint = "run the same seqmoe convert again to finish it"
    elif (path / RESIDENT_FILE).exists() or (path / experts_file(0)).exists():
        message = f"{MANIFEST_FILE} is missing in {path}"
        hint = "convert the checkpoint again, with --force"
    elif (path / "config.json").exists():
        message = f"{path} is a checkpoint that is not packed yet"
        hint = f"run seqmoe convert {path}"
    return PackedModelError(message, hint)
