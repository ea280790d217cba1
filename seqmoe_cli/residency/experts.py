"""PooledExperts: the routed experts of all layers, computed out of the pool's slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from seqmoe_cli.residency.pool import ExpertPool
from seqmoe_cli.residency.replayed import ReplayedRouting
from seqmoe_kernels import combine, expert_pairs
from seqmoe_kernels.formats import ExpertFormat

MAX_WAVE = 256  # experts that one resolve event takes
RoutingObserver = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Called with (layer, ids [T, K], weights [T, K]) before a layer is computed."""


class PooledExperts:
    """Called by a decoder for each layer; see `Experts` in `models/decoder.py`.

    The bits of the result do not depend on the pool: every (token, expert) pair is computed by
    itself into its own place, and the pairs of a token are added up in the router's order.
    """

    def __init__(self, pool: ExpertPool, fmt: ExpertFormat, num_experts: int) -> None:
        self.pool = pool
        self.fmt = fmt
        self.num_experts = num_experts
        self.observer: RoutingObserver | None = None
        self.replayed: ReplayedRouting | None = None  # chooses the experts of single tokens

    def __call__(
        self, layer: int, h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """h [T, H], expert ids int32 [T, K], weights f32 [T, K] -> [T, H] in h's dtype."""
        if self.replayed is not None and ids.shape[0] == 1:
            ids = self.replayed.choose(layer)
        if self.observer is not None:
            self.observer(layer, ids, weights)
        pairs = torch.empty((*ids.shape, h.shape[1]), dtype=torch.float32, device=h.device)
        first = layer * self.num_experts
        if ids.shape[0] == 1:  # one token: its K experts are distinct and fit any pool
            slots = self.pool.require(ids[0] + first)
            expert_pairs(h, self.pool.slots, slots.unsqueeze(0), self.fmt, pairs)
        else:
            for wave in self._waves(ids, first):
                slot_of = torch.full((self.num_experts,), -1, dtype=torch.int32, device=h.device)
                slot_of[wave.long() - first] = self.pool.require(wave)
                expert_pairs(h, self.pool.slots, slot_of[ids.long()], self.fmt, pairs)
        return combine(pairs, weights, h.dtype)

    def _waves(self, ids: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
        """The distinct experts of many tokens in groups that fit the pool, residents first."""
        wanted = torch.unique(ids) + first  # sorted
        resident = self.pool.is_resident(wanted)
        wanted = torch.cat((wanted[resident], wanted[~resident]))
        yield from torch.split(wanted, min(self.pool.num_slots, MAX_WAVE))
