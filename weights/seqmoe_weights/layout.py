"""Records: where the parts of one expert lie in its bytes, views of them, and packing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from seqmoe_kernels.formats import TORCH_DTYPES, find_format

RECORD_ALIGNMENT = 4096
PART_ALIGNMENT = 256
DTYPE_BYTES = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file or record. `dtype` is a safetensors dtype name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Part(StoredTensor):
    """One tensor inside a record, `offset` in bytes."""

    offset: int


@dataclass(frozen=True)
class RecordLayout:
    """The record of every expert of a layer, its weights stored in one format.

    Parts in the order in which the kernel reads them: gate [I, H], up [I, H], down [H, I], then
    the next part of each, such as gate_scale, up_scale, down_scale; see `seqmoe_kernels.formats`.
    The last part is always `stamp`: one I64, the flat expert id (layer * num_experts + expert), by
    which a slot can prove what it holds.
    """

    parts: tuple[Part, ...]
    record_bytes: int
    format: str

    def __getitem__(self, name: str) -> Part:
        return {part.name: part for part in self.parts}[name]

    @classmethod
    def for_experts(cls, hidden: int, inter: int, format_name: str) -> RecordLayout:
        """Lay out an expert of `inter` x `hidden`. Raises `ValueError` for an unknown format."""
        fmt = find_format(format_name)
        shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
        stored = [
            [(f"{name}{part.suffix}", part.dtype, part.shape) for part in fmt.parts(*shape)]
            for name, shape in shapes.items()
        ]
        tensors = [tensor for together in zip(*stored, strict=True) for tensor in together]
        parts: list[Part] = []
        offset = 0
        for name, dtype, shape in (*tensors, ("stamp", "I64", (1,))):
            parts.append(Part(name, dtype, shape, offset))
            offset = _round_up(offset + parts[-1].num_bytes, PART_ALIGNMENT)
        return cls(tuple(parts), _round_up(offset, RECORD_ALIGNMENT), format_name)

    @classmethod
    def for_layers(
        cls, hidden: int, inter: int, formats: Sequence[str]
    ) -> tuple[RecordLayout, ...]:
        """A layout for each layer, by the format of its experts. All records are as wide as the
        widest and have their stamp at the same place, so that any slot holds any record."""
        layouts = {name: cls.for_experts(hidden, inter, name) for name in set(formats)}
        widest = max(layouts.values(), key=lambda layout: layout["stamp"].offset)
        return tuple(
            replace(
                layouts[name],
                parts=(*layouts[name].parts[:-1], widest["stamp"]),
                record_bytes=widest.record_bytes,
            )
            for name in formats
        )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def part_view(record: torch.Tensor, part: Part) -> torch.Tensor:
    """The bytes of `part` within `record` (uint8 [record_bytes], contiguous) as a typed tensor.

    Nothing is copied: writing to the view writes the record.
    """
    data = record[part.offset : part.offset + part.num_bytes]
    return data.view(TORCH_DTYPES[part.dtype]).view(part.shape)


def pack_record(
    record: torch.Tensor, layout: RecordLayout, parts: dict[str, torch.Tensor], flat_id: int
) -> None:
    """Fill `record` (uint8 [record_bytes], its padding zero already) with one expert.

    `parts` are gate, up and down, either as the record stores them, with all other parts that the
    format has (scales may be BF16 or F32: widening is exact), or plain, to be encoded.
    """
    fmt = find_format(layout.format)
    for name in ("gate", "up", "down"):
        weight = parts[name]
        names = [f"{name}{part.suffix}" for part in fmt.parts(*weight.shape)]
        is_stored = weight.dtype == TORCH_DTYPES[layout[name].dtype]
        stored = [parts[each] for each in names] if is_stored else fmt.encode(weight)
        for each, tensor in zip(names, stored, strict=True):
            part_view(record, layout[each]).copy_(tensor)
    part_view(record, layout["stamp"]).fill_(flat_id)


def format_text(layouts: Sequence[RecordLayout]) -> str:
    """The formats of a model's experts, for people."""
    return " and ".join(sorted({layout.format for layout in layouts}))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
