"""Packer: which files a packed model will have, and the bytes of each, made from a source."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, BinaryIO

import torch

from seqmoe_kernels.formats import TORCH_DTYPES
from seqmoe_weights.errors import CheckpointError
from seqmoe_weights.files import Data, FileHashes, Meter, write_pieces
from seqmoe_weights.layout import DTYPE_BYTES, RecordLayout, StoredTensor, bytes_of, pack_record
from seqmoe_weights.manifest import RESIDENT_FILE, experts_file
from seqmoe_weights.source import Source, SourceTensor, TensorDigest

_HEADER_ALIGNMENT = 64
QUANTIZE = {"fp8": "F8_E4M3"}  # what formats are called on the command line


class Packer:
    """Packs one source. Building it checks every header; nothing is read beyond them until `write`
    or `hash_source`, which hold one record and one mapped tensor at a time."""

    def __init__(self, source: Source, quantize: str) -> None:
        """`quantize` is keep, fp8 or the name of a format. Raises `CheckpointError` when a tensor
        is missing or contradicts the config, or when experts that are FP8 shall be quantised."""
        self._source, self._config = source, source.config
        self._resident = dict(self._plan_resident())
        self._layers = {
            experts_file(layer): [
                self._expert(layer, expert) for expert in range(self._config.num_experts)
            ]
            for layer in range(self._config.num_hidden_layers)
        }
        formats = [_dtype_of(experts) for experts in self._layers.values()]
        if quantize != "keep" and "F8_E4M3" in formats:
            raise CheckpointError(
                f"--quantize {quantize}: the experts of this checkpoint are FP8 already",
                "leave the flag out; their bits are kept",
            )
        if quantize != "keep":
            formats = [QUANTIZE.get(quantize, quantize)] * len(formats)
        self.layouts = RecordLayout.for_layers(
            self._config.hidden_size, self._config.moe_intermediate_size, formats
        )
        self.file_names = [RESIDENT_FILE, *self._layers]
        self._refuse_leftovers()

    @property
    def dense_format(self) -> str:
        """How linear layers outside the experts are stored; see `ModelConfig.dense_format`."""
        specs = self._source.family.resident_tensors(self._config)
        linear = next((spec for spec in specs if spec.quantized), specs[0])
        dtype = self._source.tensors[linear.name].dtype
        return "FP8" if dtype == "F8_E4M3" else dtype

    @property
    def resident_bytes(self) -> int:
        return len(_header(self._resident)) + sum(tensor.num_bytes for tensor in self._resident)

    @property
    def records_bytes(self) -> int:
        return self._config.num_routed_experts * self.layouts[0].record_bytes

    @property
    def num_bytes(self) -> int:
        """Size of the files it writes."""
        return self.resident_bytes + self.records_bytes

    @property
    def source_bytes(self) -> int:
        """Bytes of the source tensors that the packed model is made from."""
        return sum(t.num_bytes for name in self.file_names for t in self._reads(name))

    def write(self, name: str, file: BinaryIO, meter: Meter) -> tuple[FileHashes, str]:
        """Write the content of the packed file `name`; its hashes, and that of what was read."""
        digest = TensorDigest()
        pieces: Iterable[Iterable[Data]]
        if name == RESIDENT_FILE:
            pieces = [self._resident_data(digest)]
        else:
            pieces = self._records(self.file_names.index(name) - 1, digest)
        return write_pieces(file, pieces, meter), digest.hexdigest()

    def hash_source(self, name: str, meter: Meter) -> str:
        """Hash of the source tensors that `write` would read for the packed file `name`."""
        digest = TensorDigest()
        for tensor in self._reads(name):
            self._source.read(tensor, digest)
            meter.add(tensor.num_bytes)
        return digest.hexdigest()

    def _plan_resident(self) -> list[tuple[StoredTensor, SourceTensor]]:
        """The resident tensors and what each is made of. Wide dtypes come first in the file, so
        that every tensor is aligned; then it goes by name."""
        planned: list[tuple[StoredTensor, SourceTensor]] = []
        for spec in self._source.family.resident_tensors(self._config):
            weight, scale = self._source.resolve(spec)
            planned.append((weight, weight))
            if scale is not None:
                planned.append((replace(scale, dtype="F32"), scale))
        return sorted(planned, key=lambda item: (-DTYPE_BYTES[item[0].dtype], item[0].name))

    def _resident_data(self, digest: TensorDigest) -> Iterator[Data]:
        yield _header(self._resident)
        for tensor, source in self._resident.items():
            data = self._source.read(source, digest).to(TORCH_DTYPES[tensor.dtype])
            yield bytes_of(data.contiguous())

    def _records(self, layer: int, digest: TensorDigest) -> Iterator[list[Data]]:
        """The records of a layer, each in the same memory."""
        record = torch.zeros(self.layouts[layer].record_bytes, dtype=torch.uint8)
        for expert, tensors in enumerate(self._layers[experts_file(layer)]):
            parts = {part: self._source.read(tensor, digest) for part, tensor in tensors.items()}
            flat_id = layer * self._config.num_experts + expert
            pack_record(record, self.layouts[layer], parts, flat_id)
            yield [bytes_of(record)]

    def _expert(self, layer: int, expert: int) -> dict[str, SourceTensor]:
        found: dict[str, SourceTensor] = {}
        specs = self._source.family.expert_tensors(self._config, layer, expert)
        for part, spec in specs.items():
            found[part], scale = self._source.resolve(spec)
            if scale is not None:
                found[f"{part}_scale"] = scale
        return found

    def _reads(self, name: str) -> Iterable[SourceTensor]:
        """The source tensors that the packed file `name` is made from."""
        if name == RESIDENT_FILE:
            return self._resident.values()
        return (tensor for expert in self._layers[name] for tensor in expert.values())

    def _refuse_leftovers(self) -> None:
        """A tensor that is left out in silence would make another model."""
        used = {tensor.name for name in self.file_names for tensor in self._reads(name)}
        if self._config.tie_word_embeddings:
            used.add("lm_head.weight")  # a copy of the embedding
        for name in sorted(self._source.tensors.keys() - used):
            if not name.endswith("rotary_emb.inv_freq"):  # computed from the config
                raise CheckpointError(
                    f"{self._source.tensors[name].file}: tensor {name} has no place in a "
                    f"{self._config.family} of {self._config.num_hidden_layers} layers",
                    "config.json and the weights do not belong together, or the model is another",
                )


def _dtype_of(experts: list[dict[str, SourceTensor]]) -> str:
    """The one dtype of a layer's expert weights; looks at each of them."""
    first = experts[0]["gate"]
    for part, tensor in (item for expert in experts for item in expert.items()):
        if not part.endswith("_scale") and tensor.dtype != first.dtype:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}, but "
                f"{first.name} is {first.dtype}",
                "all experts of a layer must have the same dtype",
            )
    return first.dtype


def _header(tensors: Iterable[StoredTensor]) -> bytes:
    """The start of a safetensors file that holds `tensors`, which are in file order.

    Written by hand, because the safetensors library wants all tensors in memory at once, and pads
    its header to 8 bytes: the files that are there already have other hashes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        place = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        header[tensor.name] = place
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
