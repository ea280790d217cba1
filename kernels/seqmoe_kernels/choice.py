"""The router's choice for one token, and where the chosen experts are: one launch for a layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.checks import FLOATS, check, check_kernel_device
from seqmoe_kernels.formats import PoolState
from seqmoe_kernels.lookup import (
    Resolved,
    check_pool,
    resolve_experts,
    resolve_reference,
    warps_for,
)
from seqmoe_kernels.pdl import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.router import best_experts, route_reference


class Routing(NamedTuple):
    """The router's rule: how many experts of how many, and whether their weights add up to 1."""

    num_experts: int
    top_k: int
    renormalize: bool


class RecordedIds(NamedTuple):
    """Choices to take in the place of the router's: `ids` int32 [steps, L, K], and the `step`
    (int64 [1], modulo the number of steps) that is on."""

    ids: torch.Tensor
    step: torch.Tensor


class Chosen(NamedTuple):
    """The K experts of one token in a layer, best first."""

    wanted: torch.Tensor  # int32 [K], flat expert ids
    weights: torch.Tensor  # f32 [K]
    resolved: Resolved


def choose_reference(
    logits: torch.Tensor,
    layer: int,
    routing: Routing,
    pool: PoolState,
    recorded: RecordedIds | None = None,
) -> Chosen:
    ids, weights = route_reference(logits, routing.top_k, routing.renormalize)
    chosen = ids[0]
    if recorded is not None:
        chosen = recorded.ids[recorded.step % len(recorded.ids), layer][0]
    wanted = chosen + layer * routing.num_experts
    return Chosen(wanted, weights[0], resolve_reference(wanted, pool))


@triton.jit
def _choose_kernel(
    logits,
    wanted,
    weights,
    pool,
    resolved,
    recorded_ids,
    recorded_step,
    num_recorded,
    layer,
    num_layers,
    num_slots,
    num_gaps,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    RECORDED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    ids, shares = best_experts(logits, E, K, BLOCK_E, BLOCK_K, RENORMALIZE)
    rank = tl.arange(0, BLOCK_K)
    if RECORDED:
        row = tl.load(recorded_step) % num_recorded * num_layers + layer
        ids = tl.load(recorded_ids + row * K + rank, mask=rank < K, other=0)
    flat = ids + layer * E
    tl.store(wanted + rank, flat, mask=rank < K)
    tl.store(weights + rank, shares, mask=rank < K)
    resolve_experts(flat, K, pool, resolved, num_slots, num_gaps, BLOCK_S)


def choose_triton(
    logits: torch.Tensor,
    layer: int,
    routing: Routing,
    pool: PoolState,
    recorded: RecordedIds | None = None,
) -> Chosen:
    check_kernel_device(logits)
    num_experts, top_k, renormalize = routing
    check("logits", logits, FLOATS, (1, num_experts), logits.device)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}, expected 1 to {num_experts} (the number of experts)")
    check_pool(pool, logits.device)
    if recorded is not None:
        num_layers = len(pool.slot_of) // num_experts
        check("ids", recorded.ids, torch.int32, (-1, num_layers, top_k), logits.device)
        check("step", recorded.step, torch.int64, (1,), logits.device)

    def ints(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=logits.device)

    weights = torch.empty(top_k, dtype=torch.float32, device=logits.device)
    resolved = Resolved(ints(top_k), ints(top_k), ints(top_k), ints(1))
    chosen = Chosen(ints(top_k), weights, resolved)
    block_slots = triton.next_power_of_2(len(pool.owner))
    _choose_kernel[(1,)](
        logits,
        chosen.wanted,
        weights,
        pool,
        resolved,
        *((None, None, 1) if recorded is None else (*recorded, len(recorded.ids))),
        layer,
        len(pool.slot_of) // num_experts,
        len(pool.owner),
        len(pool.log_sums),
        num_experts,
        top_k,
        triton.next_power_of_2(num_experts),
        triton.next_power_of_2(top_k),
        block_slots,
        renormalize,
        recorded is not None,
        num_warps=warps_for(block_slots),
        enable_fp_fusion=True,
        **pdl_options(logits.device),
    )
    return chosen


def choose(
    logits: torch.Tensor,
    layer: int,
    routing: Routing,
    pool: PoolState,
    recorded: RecordedIds | None = None,
) -> Chosen:
    """`route` the `logits` [1, E] of one token in `layer`, then `resolve` the chosen experts.

    With `recorded` the router's weights stay, its choice is replaced. Updates `pool` in place.
    """
    run = choose_triton if logits.is_cuda else choose_reference
    return run(logits, layer, routing, pool, recorded)
