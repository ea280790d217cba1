"""Records: views of the parts inside the bytes of one expert, and packing them."""

from __future__ import annotations

import torch

from seqmoe_kernels.formats import TORCH_DTYPES, find_format
from seqmoe_weights.layout import Part, RecordLayout


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
