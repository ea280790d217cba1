"""The experts of chosen (token, expert) pairs of many tokens, from the records that lie in slots.

One expert after the other, its weights decoded for a matrix product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.formats.fp8_block import dequantize, num_blocks
from seqmoe_kernels.state import ExpertFormat


def record_part(
    record: torch.Tensor, offset: int, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """View `shape` elements of `dtype` at byte `offset` of a uint8 record, without a copy."""
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    return record[offset : offset + num_bytes].view(dtype).view(shape)


def expert_weights(
    record: torch.Tensor, fmt: ExpertFormat, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return gate, up [I, H] and down [H, I] of a uint8 record, decoded to `dtype`."""
    wide, tall = (fmt.inter, fmt.hidden), (fmt.hidden, fmt.inter)
    weights = []
    for shape, offset, scale_offset in (
        (wide, fmt.gate, fmt.gate_scale),
        (wide, fmt.up, fmt.up_scale),
        (tall, fmt.down, fmt.down_scale),
    ):
        weight = record_part(record, offset, shape, fmt.weight_dtype)
        if fmt.weight_dtype == torch.float8_e4m3fn:
            scale = record_part(record, scale_offset, num_blocks(*shape), torch.float32)
            weights.append(dequantize(weight, scale, dtype))
        else:
            weights.append(weight.to(dtype))
    return weights


def _pairs_by_slot(pair_slots: torch.Tensor) -> dict[int, torch.Tensor]:
    """Map each slot in use to the flat indices (int64, ascending) of its pairs. Waits for a GPU."""
    pairs: dict[int, list[int]] = {}
    for pair, slot in enumerate(pair_slots.flatten().tolist()):
        if slot >= 0:
            pairs.setdefault(slot, []).append(pair)
    order = [pair for group in pairs.values() for pair in group]
    indices = torch.tensor(order, dtype=torch.int64, device=pair_slots.device)
    groups = indices.split([len(group) for group in pairs.values()])
    return dict(zip(pairs, groups, strict=True))


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x weight^T in f32, summed in f32."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()


def check_slots(slots: torch.Tensor, fmt: ExpertFormat, device: torch.device) -> None:
    check("slots", slots, torch.uint8, (-1, fmt.record_bytes), device)
    if fmt.weight_dtype not in (*FLOATS, torch.float8_e4m3fn):
        raise ValueError(f"records of {fmt.weight_dtype} are not supported")
    if fmt.hidden % 16 or fmt.inter % 16:
        sizes = f"{fmt.inter} x {fmt.hidden}"
        raise ValueError(f"experts are {sizes}, expected multiples of 16")
    offsets = (fmt.gate, fmt.up, fmt.down, fmt.record_bytes)
    if any(offset % 16 for offset in offsets):
        raise ValueError(f"record offsets are {offsets}, expected multiples of 16")


def check_expert_pairs(
    x: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    fmt: ExpertFormat,
    out: torch.Tensor,
) -> None:
    check("x", x, FLOATS, (-1, fmt.hidden), x.device)
    check_slots(slots, fmt, x.device)
    check("pair_slots", pair_slots, torch.int32, (x.shape[0], -1), x.device)
    check("out", out, torch.float32, (*pair_slots.shape, fmt.hidden), x.device)


def expert_pairs(
    x: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    fmt: ExpertFormat,
    out: torch.Tensor,
) -> None:
    """Write down(silu(gate(x)) * up(x)) of every pair into `out` (f32 [T, K, H]).

    `x` is [T, H], `slots` uint8 [S, R]; `pair_slots` (int32 [T, K]) names the slot of the k-th
    expert of a token, -1 leaves `out` as it is. Sums are f32; the activation is rounded to the
    dtype of `x`; on a GPU so are FP8 weights. A pair's bits depend neither on its slot nor on the
    other experts of the call. The host waits for `pair_slots`.
    """
    check_expert_pairs(x, slots, pair_slots, fmt, out)
    weight_dtype = x.dtype if x.is_cuda else torch.float32
    for slot, pairs in _pairs_by_slot(pair_slots).items():
        gate, up, down = expert_weights(slots[slot], fmt, weight_dtype)
        rows = x[pairs // pair_slots.shape[1]]
        act = F.silu(_product(rows, gate)) * _product(rows, up)
        out.view(-1, fmt.hidden)[pairs] = _product(act.to(x.dtype), down)
