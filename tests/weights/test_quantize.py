"""FP8 in blocks, and the record that holds it."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels.formats import find_format
from seqmoe_kernels.formats.fp8_block import FP8
from seqmoe_weights.layout import (
    PART_ALIGNMENT,
    RECORD_ALIGNMENT,
    RecordLayout,
    pack_record,
    part_view,
)

encode = find_format("F8_E4M3").encode


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 40), (1, 1), (96, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_error_is_at_most_half_a_step(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    codes, scales = encode(weight)
    assert codes.dtype == torch.float8_e4m3fn
    assert (codes.shape, scales.dtype) == (weight.shape, torch.float32)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    # 3 bits of mantissa: half a step is 2^-4 of the value; below 2^-6 steps are 2^-9 of the scale.
    bound = torch.maximum(weight.float().abs() / 16, wide * 2.0**-10) * 1.001
    assert ((FP8.decode((codes, scales), torch.float32) - weight.float()).abs() <= bound).all()


def test_every_block_uses_the_whole_range() -> None:
    weight = torch.randn(256, 256) * torch.tensor([[1e-3], [1e3]]).repeat_interleave(128, 0)
    codes, scales = encode(weight)
    largest = codes.float().abs().view(2, 128, 2, 128).amax(dim=(1, 3))
    assert (largest == 448).all()
    assert torch.allclose(scales * 448, weight.abs().view(2, 128, 2, 128).amax(dim=(1, 3)))


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 3e38, -3e38])
def test_extreme_blocks_stay_finite(value: float) -> None:
    weight = torch.full((128, 128), value)
    codes, scales = encode(weight)
    assert codes.float().isfinite().all()
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert torch.allclose(FP8.decode((codes, scales), torch.float32), weight, rtol=0.07, atol=1e-39)


def test_exact_values_survive() -> None:
    """What FP8 can hold exactly comes back exactly, ties go to even."""
    steps = torch.tensor([448.0, 416.0, 1.0, -0.5, 2.0**-9, 0.0, 17.0, 19.0])
    codes, scales = encode(steps[None])
    assert scales.item() == 1
    assert codes.float().tolist() == [[448.0, 416.0, 1.0, -0.5, 2.0**-9, 0.0, 16.0, 20.0]]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3"])
@pytest.mark.parametrize(("hidden", "inter"), [(128, 128), (256, 128), (200, 72)])
def test_parts_lie_aligned_and_apart(dtype: str, hidden: int, inter: int) -> None:
    layout = RecordLayout.for_experts(hidden, inter, dtype)
    assert layout.record_bytes % RECORD_ALIGNMENT == 0
    end = 0
    for part in layout.parts:
        assert part.offset >= end
        assert part.offset % PART_ALIGNMENT == 0
        end = part.offset + part.num_bytes
    assert end <= layout.record_bytes
    names = ["gate", "up", "down"]
    names += [f"{name}_scale" for name in names] if dtype == "F8_E4M3" else []
    assert [part.name for part in layout.parts] == [*names, "stamp"]


def test_qwen3_30b_record() -> None:
    layout = RecordLayout.for_experts(2048, 768, "F8_E4M3")
    assert layout.record_bytes == 4_722_688
    assert layout["gate_scale"].shape == (6, 16)
    assert layout["down_scale"].shape == (16, 6)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_packing_and_reading_back(scale_dtype: torch.dtype) -> None:
    layout = RecordLayout.for_experts(200, 130, "F8_E4M3")
    parts: dict[str, torch.Tensor] = {}
    for name, shape in (("gate", (130, 200)), ("up", (130, 200)), ("down", (200, 130))):
        parts[name], scale = encode(torch.randn(shape))
        parts[f"{name}_scale"] = scale.to(scale_dtype)
    record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
    pack_record(record, layout, parts, flat_id=2**40 + 7)
    for name, tensor in parts.items():
        view = part_view(record, layout[name])
        assert view.dtype == (torch.float32 if name.endswith("_scale") else torch.float8_e4m3fn)
        assert torch.equal(view.float(), tensor.float())
    assert part_view(record, layout["stamp"]).tolist() == [2**40 + 7]


def test_packing_quantises_when_the_record_wants_fp8() -> None:
    weights = {
        "gate": torch.randn(64, 128),
        "up": torch.randn(64, 128),
        "down": torch.randn(128, 64),
    }
    layout = RecordLayout.for_experts(128, 64, "F8_E4M3")
    record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
    pack_record(record, layout, weights, flat_id=0)
    for name, weight in weights.items():
        codes, scales = encode(weight)
        assert torch.equal(part_view(record, layout[name]).float(), codes.float())
        assert torch.equal(part_view(record, layout[f"{name}_scale"]), scales)
