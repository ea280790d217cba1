"""The record layout in the form that kernels take."""

from __future__ import annotations

import torch

from seqmoe_kernels import ExpertFormat
from seqmoe_weights.layout import RecordLayout

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}


def expert_format(layout: RecordLayout) -> ExpertFormat:
    """The record layout in the form that kernels take."""

    def offset(name: str) -> int:
        return layout[name].offset if name in layout else -1

    gate = layout["gate"]
    inter, hidden = gate.shape
    return ExpertFormat(
        weight_dtype=_DTYPES[gate.dtype],
        hidden=hidden,
        inter=inter,
        gate=gate.offset,
        up=layout["up"].offset,
        down=layout["down"].offset,
        gate_scale=offset("gate_scale"),
        up_scale=offset("up_scale"),
        down_scale=offset("down_scale"),
        stamp=layout["stamp"].offset,
        record_bytes=layout.record_bytes,
    )
