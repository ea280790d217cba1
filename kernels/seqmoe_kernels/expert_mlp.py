"""The experts of chosen (token, expert) pairs, computed from the records that lie in slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from seqmoe_kernels.formats import ExpertFormat
from seqmoe_kernels.fp8 import BLOCK, dequantize_reference


def record_part(
    record: torch.Tensor, offset: int, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """View `shape` elements of `dtype` at byte `offset` of a uint8 record, without a copy."""
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    return record[offset : offset + num_bytes].view(dtype).view(shape)


def expert_pairs_reference(
    x: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    fmt: ExpertFormat,
    out: torch.Tensor,
) -> None:
    top_k = pair_slots.shape[1]
    for slot in sorted(set(pair_slots.flatten().tolist())):
        if slot < 0:
            continue
        gate, up, down = expert_weights_reference(slots[slot], fmt)
        pairs = (pair_slots.flatten() == slot).nonzero().flatten()
        rows = x[pairs // top_k].float()
        act = (F.silu(F.linear(rows, gate)) * F.linear(rows, up)).to(x.dtype)
        out.view(-1, fmt.hidden)[pairs] = F.linear(act.float(), down)


def expert_weights_reference(record: torch.Tensor, fmt: ExpertFormat) -> list[torch.Tensor]:
    """Return gate, up [I, H] and down [H, I] of a uint8 record, decoded to f32."""
    wide, tall = (fmt.inter, fmt.hidden), (fmt.hidden, fmt.inter)
    weights = []
    for shape, offset, scale_offset in (
        (wide, fmt.gate, fmt.gate_scale),
        (wide, fmt.up, fmt.up_scale),
        (tall, fmt.down, fmt.down_scale),
    ):
        weight = record_part(record, offset, shape, fmt.weight_dtype)
        if fmt.weight_dtype == torch.float8_e4m3fn:
            blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
            scale = record_part(record, scale_offset, blocks, torch.float32)
            weights.append(dequantize_reference(weight, scale, torch.float32))
        else:
            weights.append(weight.float())
    return weights


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
    dtype of `x`. A pair's bits depend neither on its slot nor on the other experts of the call.
    """
    expert_pairs_reference(x, slots, pair_slots, fmt, out)
