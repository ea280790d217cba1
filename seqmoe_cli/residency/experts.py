"""PooledExperts: the routed experts of all layers, computed out of the pool's slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from seqmoe_cli.residency.eviction import Eviction
from seqmoe_cli.residency.pool import MAX_WAVE, ExpertPool
from seqmoe_cli.residency.prefetch import Prefetch
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
from seqmoe_kernels.eviction.expected_use import ExpectedUse

SEED_TOKENS = 16  # of a prompt, its last ones, whose experts are kept for the answer
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
        self.prefetch: Prefetch | None = None  # asks for experts that later layers may want
        self.eviction: Eviction | None = None  # by a forecast
        self.used: torch.Tensor | None = None  # int32 [L * K], flat ids of the last single token
        self.ready: Callable[[], None] | None = None  # called once before the next choice
        self.routed: torch.Tensor | None = None  # int32 [n, L, K], those of the last of many tokens

    @property
    def expected_use(self) -> ExpectedUse | None:
        """By which victims are chosen; None: by the pool's own scores."""
        return None if self.eviction is None else self.eviction.expected_use

    def __call__(
        self, layer: int, x: torch.Tensor, h: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """x, h [T, H], the router's logits [T, E] -> x plus the chosen experts over h, [T, H]. For
        one token, those of later routers may follow."""
        if x.shape[0] == 1:
            return self._one(layer, x, h, logits)
        num_experts, top_k, renormalize = self.routing
        ids, weights = route(logits, top_k, renormalize)
        if self.observer is not None:
            self.observer(layer, ids, weights)
        pairs = torch.empty((*ids.shape, h.shape[1]), dtype=torch.float32, device=h.device)
        first = layer * num_experts
        if self.routed is not None:
            last = ids[-len(self.routed) :]
            self.routed[-len(last) :, layer] = last + first
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
        flights = self.pool.flights
        handover = None if self.prefetch is None or flights is None else self.prefetch.handover
        own, later = logits.tensor_split([self.routing.num_experts], dim=1)
        if self.ready is not None:
            self.ready()
            self.ready = None
        state, expected_use = self.pool.state, self.expected_use
        chosen = choose(
            own if handover is None else logits, layer, self.routing, state, recorded, flights,
            expected_use, self.used if handover is None else handover.used, handover,
        )  # fmt: skip
        if self.observer is not None:
            ids = chosen.wanted - layer * self.routing.num_experts
            self.observer(layer, ids.unsqueeze(0), chosen.weights.unsqueeze(0))
        ahead = None
        if self.prefetch is not None and flights is not None and handover is None:
            ahead = self.prefetch.ahead(layer, later, chosen, expected_use)
        self.pool.fetch(chosen.wanted, chosen.resolved, ahead, handover, layer)
        return expert_mlp(x, h, self.pool.slots, chosen.resolved, chosen.weights, self.fmt)

    def _waves(self, ids: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
        """The distinct experts of many tokens in groups that fit the pool, residents first. What is
        fetched and not used by the last tokens is the next to leave: so a prompt that wants nearly
        all experts goes through a part of the pool, and what answers live on stays."""
        wanted = torch.unique(ids) + first  # sorted
        resident = self.pool.is_resident(wanted)
        here, absent = wanted[resident], wanted[~resident]
        if len(here):
            yield from torch.split(here, min(self.pool.largest_event, MAX_WAVE))
        size, last = min(-(-self.pool.num_slots // 4), MAX_WAVE), ids[-SEED_TOKENS:] + first
        for wave in torch.split(absent, size) if len(absent) else ():
            yield wave
            self.pool.demote(wave[~torch.isin(wave, last)])
