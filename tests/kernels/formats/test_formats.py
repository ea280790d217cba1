"""Every way to store weights: its parts, and that it decodes what it encodes."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels import formats
from seqmoe_kernels.formats import (
    TORCH_DTYPES,
    Format,
    Part,
    decode_by_tiles,
    find_format,
    format_names,
    format_of,
    register,
)
from seqmoe_kernels.formats.plain import Plain

# The largest error of a stored value, as a share of the largest of its weight.
ROUNDING = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "F8_E4M3": 2**-4}


def test_all_formats_are_found() -> None:
    assert format_names() == sorted(ROUNDING)
    with pytest.raises(ValueError, match=r"no format is called Q9, there are BF16, F16, F32, F8_"):
        find_format("Q9")


def test_a_name_has_one_format(monkeypatch: pytest.MonkeyPatch) -> None:
    register(find_format("F16"))
    with pytest.raises(ValueError, match="F16"):
        register(Plain("F16"))
    monkeypatch.setattr(formats, "_formats", {})  # also before any was asked for
    with pytest.raises(ValueError, match="F16"):
        register(Plain("F16"))


@pytest.mark.parametrize("name", ROUNDING)
def test_the_format_of_a_tensor(name: str) -> None:
    fmt = find_format(name)
    assert fmt.name == name and format_of(torch.zeros(2).to(TORCH_DTYPES[name])) is fmt


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("rows,cols", [(1, 16), (130, 272)])
def test_decoding_gives_what_was_encoded(
    gen: torch.Generator, name: str, rows: int, cols: int
) -> None:
    fmt = find_format(name)
    weight = torch.randn((rows, cols), generator=gen)
    parts = fmt.encode(weight)
    assert shapes(parts) == [(part.shape, part.dtype) for part in fmt.parts(rows, cols)]
    assert fmt.parts(rows, cols)[0].suffix == ""
    got = fmt.decode(parts, torch.float32)
    assert (got - weight).abs().max() <= ROUNDING[name] * weight.abs().max()


def shapes(parts: tuple[torch.Tensor, ...]) -> list[tuple[tuple[int, ...], str]]:
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    return [(tuple(part.shape), names[part.dtype]) for part in parts]


def test_fp8_has_a_scale_for_each_block() -> None:
    expected = Part("", "F8_E4M3", (130, 256)), Part("_scale", "F32", (2, 2))
    assert find_format("F8_E4M3").parts(130, 256) == expected


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tiles_decode_to_the_same_bits(
    device: torch.device, gen: torch.Generator, name: str, dtype: torch.dtype
) -> None:
    fmt = find_format(name)
    parts = fmt.encode(torch.randn((70, 272), generator=gen))
    out = torch.empty((70, 272), dtype=dtype, device=device)
    decode_by_tiles(fmt.tiles, *kernel_parts(fmt, parts, device), out)
    assert torch.equal(out.cpu(), fmt.decode(parts, dtype))


def kernel_parts(
    fmt: Format, parts: tuple[torch.Tensor, ...], device: torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    weight, *others = (part.to(device) for part in parts)
    return fmt.codes(weight), tuple(others)
