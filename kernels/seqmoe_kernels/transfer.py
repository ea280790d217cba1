"""Fetching missed experts: records of the host store are copied into their slots."""

from __future__ import annotations

import torch


def fetch_reference(
    records: torch.Tensor,
    slots: torch.Tensor,
    miss_ids: torch.Tensor,
    miss_slots: torch.Tensor,
    num_misses: torch.Tensor,
) -> None:
    count = int(num_misses)
    pairs = zip(miss_ids[:count].tolist(), miss_slots[:count].tolist(), strict=True)
    for expert, slot in pairs:
        if slot >= 0:
            slots[slot].copy_(records[expert])


def fetch(
    records: torch.Tensor,
    slots: torch.Tensor,
    miss_ids: torch.Tensor,
    miss_slots: torch.Tensor,
    num_misses: torch.Tensor,
) -> None:
    """Copy `records` (uint8 [N, R], host) of the first `num_misses` (int32 [1]) `miss_ids` (int32
    [n]) into the `miss_slots` (int32 [n]) of `slots` (uint8 [S, R]); a slot of -1 is left out.

    With `slots` on a GPU, `records` must be pinned: a kernel reads them over the link.
    """
    fetch_reference(records, slots, miss_ids, miss_slots, num_misses)
