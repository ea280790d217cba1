"""Where the weights of one expert lie in its record, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import check
from seqmoe_kernels.formats import TORCH_DTYPES, Format, find_format


class StoredWeight(NamedTuple):
    """One weight of a record."""

    format: Format
    rows: int
    cols: int
    offsets: tuple[int, ...]  # in bytes, of the format's parts

    @property
    def row_bytes(self) -> int:
        bits: int = self.format.tiles.bits.value
        return self.cols * bits // 8

    @property
    def part_offsets(self) -> tuple[int, ...]:
        """In elements of each part."""
        pairs = zip(self.offsets, self._dtypes(), strict=True)
        return tuple(offset // dtype.itemsize for offset, dtype in pairs)

    def views(self, slots: torch.Tensor) -> tuple[PartOfSlots, ...]:
        """The slots, uint8 [S, R], as arrays of each part's dtype, for kernels."""
        first, *others = (slots.view(dtype) for dtype in self._dtypes())
        typed = (self.format.codes(first), *others)
        return tuple(PartOfSlots(view, view.stride(0)) for view in typed)

    def decode(self, record: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight [rows, cols] in a uint8 record, as `dtype`."""
        parts = []
        for offset, part in zip(self.offsets, self._parts(), strict=True):
            size = torch.Size(part.shape).numel() * TORCH_DTYPES[part.dtype].itemsize
            bytes_of_part = record[offset : offset + size]
            parts.append(bytes_of_part.view(TORCH_DTYPES[part.dtype]).view(part.shape))
        return self.format.decode(parts, dtype)

    def _parts(self) -> Sequence[Any]:
        return self.format.parts(self.rows, self.cols)

    def _dtypes(self) -> list[torch.dtype]:
        return [TORCH_DTYPES[part.dtype] for part in self._parts()]


class PartOfSlots(NamedTuple):
    """One part of a stored weight in all slots, as kernels read it."""

    start: torch.Tensor  # the slots in the dtype of the part's elements
    stride: int  # elements from one slot to the next


class Activation(NamedTuple):
    """Elements of gate(h) and up(h), f32 -> what down is multiplied with, f32."""

    kernel: Any  # (gate, up), a function of Triton
    reference: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@triton.jit
def _swiglu(gate, up):
    return gate / (1 + tl.exp(-gate)) * up


SWIGLU = Activation(_swiglu, lambda gate, up: F.silu(gate) * up)


class ExpertFormat(NamedTuple):
    """The record of one expert. It may differ from layer to layer.

    `gate` and `up` [I, H] are stored in one format, `down` [H, I] in this or another one. `stamp`
    is the offset of the record's I64 flat expert id.
    """

    gate: StoredWeight
    up: StoredWeight
    down: StoredWeight
    stamp: int
    record_bytes: int
    activation: Activation = SWIGLU

    @property
    def hidden(self) -> int:
        return self.down.rows

    @property
    def inter(self) -> int:
        return self.gate.rows


class Layout(Protocol):
    """Named parts of a record: those of gate, up and down, each named with the suffix that the
    format gives it, and `stamp`."""

    @property
    def record_bytes(self) -> int: ...
    @property
    def format(self) -> str: ...
    def __getitem__(self, name: str) -> Any: ...  # `shape`, and `offset` in the record


def expert_format(layout: Layout) -> ExpertFormat:
    """A record's layout in the form that kernels take."""
    inter, hidden = layout["gate"].shape[0], layout["down"].shape[0]

    def weight(name: str, rows: int, cols: int) -> StoredWeight:
        fmt = find_format(layout.format)
        offsets = (layout[f"{name}{part.suffix}"].offset for part in fmt.parts(rows, cols))
        return StoredWeight(fmt, rows, cols, tuple(offsets))

    return ExpertFormat(
        gate=weight("gate", inter, hidden),
        up=weight("up", inter, hidden),
        down=weight("down", hidden, inter),
        stamp=layout["stamp"].offset,
        record_bytes=layout.record_bytes,
    )


def check_slots(slots: torch.Tensor, fmt: ExpertFormat, device: torch.device) -> None:
    check("slots", slots, torch.uint8, (-1, fmt.record_bytes), device)
    if fmt.hidden % 16 or fmt.inter % 16:
        sizes = f"{fmt.inter} x {fmt.hidden}"
        raise ValueError(f"experts are {sizes}, expected multiples of 16")
    if fmt.gate.format is not fmt.up.format:
        raise ValueError(f"gate is {fmt.gate.format.name}, up is {fmt.up.format.name}")
    offsets = (*(weight.offsets[0] for weight in fmt[:3]), fmt.record_bytes)
    if any(offset % 16 for offset in offsets):
        raise ValueError(f"record offsets are {offsets}, expected multiples of 16")


@triton.jit
def others_at(views, OFFSETS: tl.constexpr, slot):
    """Pointers to the parts behind the first of a weight, in the slot or each of the slots.
    `views`: a tuple of `PartOfSlots`; OFFSETS: the weight's `part_offsets`."""
    pointers = ()
    for i in tl.static_range(1, len(views)):
        pointers += (views[i].start + OFFSETS[i] + slot * views[i].stride,)  # type: ignore[assignment]
    return pointers
