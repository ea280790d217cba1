"""The router's choice: softmax over all experts, then the best few."""

from __future__ import annotations

import torch


def route_reference(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.float()
    ids = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = wide.softmax(-1).gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.int(), weights


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts for every row of `logits` [T, E].

    Returns ids (i32 [T, K], best first, the lower id first among equal logits) and weights
    (f32 [T, K]): their softmax over all E, or with `renormalize` their share of the chosen ones.
    """
    return route_reference(logits, top_k, renormalize)
