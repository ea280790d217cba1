"""The router's choice: softmax over all experts, then the best few."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.common.verb import verb


def route_reference(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.float()
    ids = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = wide.softmax(-1).gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.int(), weights


@triton.jit
def sort_key(logit, expert, E: tl.constexpr):
    """Map (logit, expert) to an int64 that grows with the logit, then with a falling expert id."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)  # one zero, not two
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, negative floats run backwards
    return (ordered.to(tl.int64) << 32) | (E - 1 - expert).to(tl.int64)


@triton.jit
def _logit_of(key):
    """The logit of a sort key."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(logits, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """The E `logits` for `best_experts`: f32 [BLOCK_E]."""
    expert = tl.arange(0, BLOCK_E)
    return tl.load(logits + expert, mask=expert < E, other=float("-inf")).to(tl.float32)


@triton.jit
def best_experts(
    logit,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Ids (i32) and weights (f32) of the K best of E logits, [BLOCK_K] with zeros behind them."""
    expert = tl.arange(0, BLOCK_E)
    rank = tl.arange(0, BLOCK_K)
    inside = expert < E
    peak = tl.max(logit, 0)
    total = tl.sum(tl.exp(logit - peak), 0)
    lowest: tl.constexpr = -(2**63)
    key = tl.where(inside, sort_key(logit, expert, E), lowest)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(K):
        best = tl.max(key, 0)
        best_id = E - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        ids = tl.where(rank == k, best_id, ids)
        weights = tl.where(rank == k, tl.exp(_logit_of(best) - peak) / total, weights)
        key = tl.where(expert == best_id, lowest, key)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 0)
    return ids, weights


@triton.jit
def _route_kernel(
    logits,
    ids,
    weights,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    row = tl.program_id(0)
    rank = tl.arange(0, BLOCK_K)
    logit = load_logits(logits + row * E, E, BLOCK_E)
    best_ids, best_weights = best_experts(logit, E, K, BLOCK_E, BLOCK_K, RENORMALIZE)
    tl.store(ids + row * K + rank, best_ids, mask=rank < K)
    tl.store(weights + row * K + rank, best_weights, mask=rank < K)


@verb(route_reference)
def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts for every row of `logits` [T, E].

    Returns ids (i32 [T, K], best first, the lower id first among equal logits) and weights
    (f32 [T, K]): their softmax over all E, or with `renormalize` their share of the chosen ones.
    """
    check("logits", logits, FLOATS, (-1, -1), logits.device)
    rows, num_experts = logits.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}, expected 1 to {num_experts} (the number of experts)")
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    if rows > 0:
        _route_kernel[(rows,)](
            logits,
            ids,
            weights,
            num_experts,
            top_k,
            triton.next_power_of_2(num_experts),
            triton.next_power_of_2(top_k),
            renormalize,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return ids, weights
