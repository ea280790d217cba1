"""RecordLayout: where the parts of one expert lie inside its record."""

from __future__ import annotations

from dataclasses import dataclass

RECORD_ALIGNMENT = 4096
PART_ALIGNMENT = 256
DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8}


@dataclass(frozen=True)
class Part:
    """One tensor inside a record. `dtype` is a safetensors dtype name, `offset` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        for dim in self.shape:
            size *= dim
        return size


@dataclass(frozen=True)
class RecordLayout:
    """The same for every expert of a model. The last part is always `stamp`: one I64, the flat
    expert id (layer * num_experts + expert), by which a slot can prove what it holds.

    Parts in the order in which the kernel reads them: gate [I, H], up [I, H], down [H, I], then,
    when they are FP8, gate_scale, up_scale [I/128, H/128] and down_scale [H/128, I/128] in F32
    (dimensions rounded up), each weight being `fp8 value * scale` of its 128x128 block.
    """

    parts: tuple[Part, ...]
    record_bytes: int

    def __getitem__(self, name: str) -> Part:
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        return any(part.name == name for part in self.parts)

    @classmethod
    def for_experts(cls, hidden: int, inter: int, weight_dtype: str) -> RecordLayout:
        """Lay out a SwiGLU expert of `inter` x `hidden`; `weight_dtype` BF16, F16, F32, F8_E4M3."""
        shapes: list[tuple[str, str, tuple[int, ...]]] = [
            ("gate", weight_dtype, (inter, hidden)),
            ("up", weight_dtype, (inter, hidden)),
            ("down", weight_dtype, (hidden, inter)),
        ]
        if weight_dtype == "F8_E4M3":
            blocks_i, blocks_h = -(-inter // 128), -(-hidden // 128)
            shapes += [
                ("gate_scale", "F32", (blocks_i, blocks_h)),
                ("up_scale", "F32", (blocks_i, blocks_h)),
                ("down_scale", "F32", (blocks_h, blocks_i)),
            ]
        shapes.append(("stamp", "I64", (1,)))
        parts: list[Part] = []
        offset = 0
        for name, dtype, shape in shapes:
            parts.append(Part(name, dtype, shape, offset))
            offset = _round_up(offset + parts[-1].num_bytes, PART_ALIGNMENT)
        return cls(tuple(parts), _round_up(offset, RECORD_ALIGNMENT))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
