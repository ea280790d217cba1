"""Records: views of the parts inside the bytes of one expert, and packing them."""

from __future__ import annotations

import torch

from seqmoe_weights.layout import Part, RecordLayout
from seqmoe_weights.quantize import quantize_fp8

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
}


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

    `parts` are gate, up, down, in the record's dtype or, when the record is FP8 and no `*_scale`
    is given, in another one, to be quantised. Scales may be BF16 or F32 (widening is exact).
    """
    for name in ("gate", "up", "down"):
        weight, scale = parts[name], parts.get(f"{name}_scale")
        if f"{name}_scale" in layout:
            if scale is None:
                weight, scale = quantize_fp8(weight)
            part_view(record, layout[f"{name}_scale"]).copy_(scale)
        part_view(record, layout[name]).copy_(weight)
    part_view(record, layout["stamp"]).fill_(flat_id)
