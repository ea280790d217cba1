"""Packer: which files a packed model will have, and the bytes of each, made from a source."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import BinaryIO

import torch

from seqmoe_kernels.formats import TORCH_DTYPES
from seqmoe_weights.errors import CheckpointError
from seqmoe_weights.files import FileHashes, Meter
from seqmoe_weights.layout import DTYPE_BYTES, RecordLayout
from seqmoe_weights.manifest import experts_file
from seqmoe_weights.records import bytes_of, pack_record
from seqmoe_weights.resident import (
    RESIDENT_FILE,
    ResidentTensor,
    header_bytes,
    in_file_order,
    write_resident,
)
from seqmoe_weights.source import Source, SourceTensor, TensorDigest

QUANTIZE = {"fp8": "F8_E4M3"}  # what formats are called on the command line


class Packer:
    """Packs one source. Building it checks every header; nothing is read beyond them until `write`
    or `hash_source`, which hold one record and one mapped tensor at a time."""

    def __init__(self, source: Source, quantize: str) -> None:
        """`quantize` is keep, fp8 or the name of a format. Raises `CheckpointError` when a tensor
        is missing or contradicts the config, or when experts that are FP8 shall be quantised."""
        self._source, self._config = source, source.config
        self._resident = dict(self._plan_resident())
        self._resident_order = in_file_order(list(self._resident))
        formats = [self._expert_dtype(layer) for layer in range(self._config.num_hidden_layers)]
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
        self._refuse_leftovers()
        self._layers = {experts_file(i): i for i in range(self._config.num_hidden_layers)}
        self.file_names = [RESIDENT_FILE, *self._layers]

    @property
    def dense_format(self) -> str:
        """How linear layers outside the experts are stored; see `ModelConfig.dense_format`."""
        specs = self._source.family.resident_tensors(self._config)
        linear = next((spec for spec in specs if spec.quantized), specs[0])
        dtype = self._source.tensors[linear.name].dtype
        return "FP8" if dtype == "F8_E4M3" else dtype

    @property
    def resident_bytes(self) -> int:
        header = len(header_bytes(self._resident_order))
        return header + sum(tensor.num_bytes for tensor in self._resident)

    @property
    def records_bytes(self) -> int:
        return self._config.num_routed_experts * self.layouts[0].record_bytes

    @property
    def source_bytes(self) -> int:
        """Bytes of the source tensors that the packed model is made from."""
        tensors = list(self._resident.values())
        tensors += [tensor for layer in self._layers.values() for tensor in self._reads(layer)]
        return sum(map(_num_bytes, tensors))

    def write(self, name: str, file: BinaryIO, meter: Meter) -> tuple[FileHashes, str]:
        """Write the content of the packed file `name`; its hashes, and that of what was read."""
        digest = TensorDigest()
        if name == RESIDENT_FILE:
            data = (self._read_resident(tensor, digest) for tensor in self._resident_order)
            return write_resident(file, self._resident_order, data, meter), digest.hexdigest()
        layer, pieces = self._layers[name], []
        layout = self.layouts[layer]
        record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
        data_of_record = bytes_of(record)
        for expert in range(self._config.num_experts):
            parts = {
                part: self._source.read(tensor, digest)
                for part, tensor in self._expert(layer, expert).items()
            }
            pack_record(record, layout, parts, layer * self._config.num_experts + expert)
            pieces.append(hashlib.sha256(data_of_record).hexdigest())
            file.write(data_of_record)
            meter.add(len(data_of_record))
        num_bytes = len(pieces) * layout.record_bytes
        return FileHashes(num_bytes, tuple(pieces)), digest.hexdigest()

    def hash_source(self, name: str, meter: Meter) -> str:
        """Hash of the source tensors that `write` would read for the packed file `name`."""
        digest = TensorDigest()
        is_resident = name == RESIDENT_FILE
        for tensor in self._resident.values() if is_resident else self._reads(self._layers[name]):
            self._source.read(tensor, digest)
            meter.add(_num_bytes(tensor))
        return digest.hexdigest()

    def _plan_resident(self) -> Iterator[tuple[ResidentTensor, SourceTensor]]:
        for spec in self._source.family.resident_tensors(self._config):
            weight, scale = self._source.resolve(spec)
            yield ResidentTensor(weight.name, weight.dtype, weight.shape), weight
            if scale is not None:
                yield ResidentTensor(scale.name, "F32", scale.shape), scale

    def _read_resident(self, tensor: ResidentTensor, digest: TensorDigest) -> torch.Tensor:
        data = self._source.read(self._resident[tensor], digest)
        return data.to(TORCH_DTYPES[tensor.dtype]).contiguous()

    def _expert(self, layer: int, expert: int) -> dict[str, SourceTensor]:
        found: dict[str, SourceTensor] = {}
        specs = self._source.family.expert_tensors(self._config, layer, expert)
        for part, spec in specs.items():
            found[part], scale = self._source.resolve(spec)
            if scale is not None:
                found[f"{part}_scale"] = scale
        return found

    def _reads(self, layer: int) -> Iterator[SourceTensor]:
        for expert in range(self._config.num_experts):
            yield from self._expert(layer, expert).values()

    def _refuse_leftovers(self) -> None:
        """A tensor that is left out in silence would make another model."""
        used = {tensor.name for tensor in self._resident.values()}
        for layer in range(self._config.num_hidden_layers):
            used |= {tensor.name for tensor in self._reads(layer)}
        if self._config.tie_word_embeddings:
            used.add("lm_head.weight")  # a copy of the embedding
        for name in sorted(self._source.tensors.keys() - used):
            if not name.endswith("rotary_emb.inv_freq"):  # computed from the config
                raise CheckpointError(
                    f"{self._source.tensors[name].file}: tensor {name} has no place in a "
                    f"{self._config.family} of {self._config.num_hidden_layers} layers",
                    "config.json and the weights do not belong together, or the model is another",
                )

    def _expert_dtype(self, layer: int) -> str:
        """The one dtype of a layer's expert weights; looks at each of them."""
        first = self._expert(layer, 0)["gate"]
        for expert in range(self._config.num_experts):
            for part, tensor in self._expert(layer, expert).items():
                if not part.endswith("_scale") and tensor.dtype != first.dtype:
                    raise CheckpointError(
                        f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}, but "
                        f"{first.name} is {first.dtype}",
                        "all experts of a layer must have the same dtype",
                    )
        return first.dtype


def _num_bytes(tensor: SourceTensor) -> int:
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
