"""The experts of chosen (token, expert) pairs of many tokens, from the records that lie in slots.

One expert after the other, its weights decoded for a matrix product.
"""

from __future__ import annotations

import torch

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.experts.record import ExpertFormat, check_slots


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


def expert_pairs(
    x: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    fmt: ExpertFormat,
    out: torch.Tensor,
) -> None:
    """Write down(activation(gate(x), up(x))) of every pair into `out` (f32 [T, K, H]).

    `x` is [T, H], `slots` uint8 [S, R]; `pair_slots` (int32 [T, K]) names the slot of the k-th
    expert of a token, -1 leaves `out` as it is. Sums are f32; the activation is rounded to the
    dtype of `x`; on a GPU so are decoded weights. A pair's bits depend neither on its slot nor on
    the other experts of the call. The host waits for `pair_slots`.
    """
    check("x", x, FLOATS, (-1, fmt.hidden), x.device)
    check_slots(slots, fmt, x.device)
    check("pair_slots", pair_slots, torch.int32, (x.shape[0], -1), x.device)
    check("out", out, torch.float32, (*pair_slots.shape, fmt.hidden), x.device)
    weight_dtype = x.dtype if x.is_cuda else torch.float32
    for slot, pairs in _pairs_by_slot(pair_slots).items():
        gate, up, down = (weight.decode(slots[slot], weight_dtype) for weight in fmt[:3])
        rows = x[pairs // pair_slots.shape[1]]
        act = fmt.activation.reference(_product(rows, gate), _product(rows, up))
        out.view(-1, fmt.hidden)[pairs] = _product(act.to(x.dtype), down)
