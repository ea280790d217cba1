"""PooledExperts: the routed experts of all layers, computed out of the pool's slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from seqmoe_cli.residency.pool import ExpertPool
from seqmoe_cli.residency.replayed import ReplayedRouting
from seqmoe_kernels import (
    ExpertFormat,
    Routing,
    choose,
    combine,
    expert_mlp,
    expert_pairs,
    route,
)

MAX_WAVE = 256  # experts that one resolve event takes
RoutingObserver = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Called with (layer, ids [T, K], weights [T, K]) before a layer is computed."""


class PooledExperts:
    """Called by a decoder for each layer; see `Experts` in `models/decoder.py`.

    The bits of the result do not depend on the pool: every (token, expert) pair is computed in the
    same way wherever its record lies, and the pairs of a token are added up in the router's order.
    """

    def __init__(self, pool: ExpertPool, fmt: ExpertFormat, routing: Routing) -> None:
        self.pool = pool
        self.fmt = fmt
        self.routing = routing
        self.observer: RoutingObserver | None = None
        self.replayed: ReplayedRouting | None = None  # chooses the experts of single tokens

    def __call__(
        self, layer: int, x: torch.Tensor, h: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """x, h [T, H], the router's logits [T, E] -> x plus the chosen experts over h, [T, H]."""
        if x.shape[0] == 1:
            return self._one(layer, x, h, logits)
        num_experts, top_k, renormalize = self.routing
        ids, weights = route(logits, top_k, renormalize)
        if self.observer is not None:
            self.observer(layer, ids, weights)
        pairs = torch.empty((*ids.shape, h.shape[1]), dtype=torch.float32, device=h.device)
        first = layer * num_experts
        for wave in self._waves(ids, first):
            slots = self.pool.require(wave)
            slot_of = slots.new_full((num_experts,), -1)
            slot_of[wave.long() - first] = slots
            expert_pairs(h, self.pool.slots, slot_of[ids.long()], self.fmt, pairs)
        return x + combine(pairs, weights, h.dtype)

    def _one(
        self, layer: int, x: torch.Tensor, h: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """One token: its K experts are distinct and fit any pool, and nothing is waited for."""
        recorded = None if self.replayed is None else self.replayed.recorded
        chosen = choose(logits, layer, self.routing, self.pool.state, recorded)
        if self.observer is not None:
            ids = chosen.wanted - layer * self.routing.num_experts
            self.observer(layer, ids.unsqueeze(0), chosen.weights.unsqueeze(0))
        self.pool.fetch(chosen.wanted, chosen.resolved)
        return expert_mlp(x, h, self.pool.slots, chosen.resolved, chosen.weights, self.fmt)

    def _waves(self, ids: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
        """The distinct experts of many tokens in groups that fit the pool, residents first."""
        wanted = torch.unique(ids) + first  # sorted
        resident = self.pool.is_resident(wanted)
        wanted = torch.cat((wanted[resident], wanted[~resident]))
        yield from torch.split(wanted, min(self.pool.num_slots, MAX_WAVE))
