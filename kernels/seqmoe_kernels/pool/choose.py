"""The router's choice for one token, and where the chosen experts are: one launch for a layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.eviction.expected_use import ExpectedUse, check_expected_use
from seqmoe_kernels.pool.landing import check_flights, look_at_flights
from seqmoe_kernels.pool.lock import (
    Handover,
    check_handover,
    layer_at,
    take_lock,
    take_lock_reference,
)
from seqmoe_kernels.pool.resolve import (
    Resolved,
    check_pool,
    resolve_experts,
    resolve_reference,
    warps_for,
)
from seqmoe_kernels.pool.route import best_experts, load_logits, route_reference
from seqmoe_kernels.state import Flights, PoolState


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
    flights: Flights | None = None,
    expected_use: ExpectedUse | None = None,
    used: torch.Tensor | None = None,
    handover: Handover | None = None,
) -> Chosen:
    logits, later = logits.tensor_split([routing.num_experts], dim=1)
    ids, weights = route_reference(logits, routing.top_k, routing.renormalize)
    chosen = ids[0]
    if recorded is not None:
        chosen = recorded.ids[recorded.step % len(recorded.ids), layer][0]
    first = layer * routing.num_experts
    wanted = chosen + first
    if used is not None:
        wanted = used[layer * routing.top_k :][: routing.top_k].copy_(wanted)
    if handover is not None:
        take_lock_reference(handover)
    resolved = resolve_reference(wanted, pool, flights, expected_use, first)
    if handover is not None:
        handover.logits[: later.shape[1]] = later[0]
        resolved = resolved._replace(slots=handover.slots.copy_(resolved.slots))
    return Chosen(wanted, weights[0], resolved)


# Compiled once for all layers, whatever their number and where their experts are noted.
@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["wanted"])
def _choose_kernel(
    logits,
    wanted,
    weights,
    resolved,
    pool,
    flights,
    expected_use,
    handover,
    recorded,
    num_recorded,
    layer,
    num_later,
    num_layers,
    num_slots,
    num_gaps,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program. logits any float [E + num_later]; wanted int32 [K] and weights f32 [K] are
    `Chosen`, with `Resolved` of size K; num_slots and num_gaps are sizes of `PoolState`. The
    structures from `flights` to `recorded` may be None."""
    let_next_start(PDL)
    if handover is not None:
        lock = take_lock(handover.lock)
    wait_for_inputs(PDL)
    logit = load_logits(logits, E, BLOCK_E)
    if handover is not None:
        if (layer > 0) & (layer_at(lock) != layer - 1):  # it was not free yet, and is now
            take_lock(handover.lock)
        i = tl.arange(0, BLOCK_L)
        later = tl.load(logits + E + i, mask=i < num_later, other=0.0).to(tl.float32)
        tl.store(handover.logits + i, later, mask=i < num_later)
    seen = None
    if flights is not None:
        seen = look_at_flights(pool, flights)
    ids, shares = best_experts(logit, E, K, BLOCK_E, BLOCK_K, RENORMALIZE)
    rank = tl.arange(0, BLOCK_K)
    if recorded is not None:
        row = tl.load(recorded.step) % num_recorded * num_layers + layer
        ids = tl.load(recorded.ids + row * K + rank, mask=rank < K, other=0)
    flat = ids + layer * E
    tl.store(wanted + rank, flat, mask=rank < K)
    tl.store(weights + rank, shares, mask=rank < K)
    resolve_experts(
        flat, K, pool, flights, seen, expected_use, layer * E, resolved, num_slots, num_gaps,
        BLOCK_S, K,
    )  # fmt: skip


@verb(choose_reference)
def choose(
    logits: torch.Tensor,
    layer: int,
    routing: Routing,
    pool: PoolState,
    recorded: RecordedIds | None = None,
    flights: Flights | None = None,
    expected_use: ExpectedUse | None = None,
    used: torch.Tensor | None = None,
    handover: Handover | None = None,
) -> Chosen:
    """`route` the `logits` [1, E] of one token in `layer`, then `resolve` the chosen experts.

    With `recorded` the router's weights stay, its choice is replaced. With `expected_use` the
    victims are those of the least expected use. What is wanted is noted in `used` (int32
    [L * K]). With `handover` the logits of later routers follow, [1, (1 + d) * E]: those and the
    slots are left there for `schedule_prefetches`. Updates `pool`, `flights` and `handover`.
    """
    num_experts, top_k, renormalize = routing
    num_later = 0
    if handover is not None:
        check_handover(handover, logits.device)
        check("slots", handover.slots, torch.int32, (top_k,), logits.device)
        num_later = min(logits.shape[1] - num_experts, len(handover.logits))
    check("logits", logits, FLOATS, (1, num_experts + num_later), logits.device)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}, expected 1 to {num_experts} (the number of experts)")
    check_pool(pool, logits.device)
    if flights is not None:
        check_flights(flights, logits.device)
        check("absent", flights.absent, torch.int32, (top_k,), logits.device)
    num_layers = len(pool.slot_of) // num_experts
    if expected_use is not None:
        check_expected_use(expected_use, len(pool.slot_of), logits.device, len(pool.owner))
    if used is not None:
        check("used", used, torch.int32, (num_layers * top_k,), logits.device)
    if recorded is not None:
        check("ids", recorded.ids, torch.int32, (-1, num_layers, top_k), logits.device)
        check("step", recorded.step, torch.int64, (1,), logits.device)

    def ints(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=logits.device)

    weights = torch.empty(top_k, dtype=torch.float32, device=logits.device)
    slots = ints(top_k) if handover is None else handover.slots
    resolved = Resolved(slots, ints(top_k), ints(top_k), ints(1))
    wanted = ints(top_k) if used is None else used[layer * top_k :][:top_k]
    block_slots = triton.next_power_of_2(len(pool.owner))
    _choose_kernel[(1,)](
        logits=logits,
        wanted=wanted,
        weights=weights,
        resolved=resolved,
        pool=pool,
        flights=flights,
        expected_use=expected_use,
        handover=handover,
        recorded=recorded,
        num_recorded=1 if recorded is None else len(recorded.ids),
        layer=layer,
        num_later=num_later,
        num_layers=num_layers,
        num_slots=len(pool.owner),
        num_gaps=len(pool.log_sums),
        E=num_experts,
        K=top_k,
        RENORMALIZE=renormalize,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_S=block_slots,
        BLOCK_L=1 if handover is None else triton.next_power_of_2(len(handover.logits)),
        num_warps=warps_for(block_slots),
        enable_fp_fusion=True,
        **pdl_options(logits.device),
    )
    return Chosen(wanted, weights, resolved)
