"""PooledExperts: the routed experts of all layers, computed out of the pool's slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from seqmoe_cli.engine.streams import Beside
from seqmoe_cli.residency.eviction import Eviction
from seqmoe_cli.residency.pool import MAX_WAVE, ExpertPool
from seqmoe_cli.residency.prefetch import Prefetch
from seqmoe_cli.residency.replayed import ReplayedRouting
from seqmoe_kernels import (
    ExpertFormat,
    RecordedIds,
    Routing,
    StepForecast,
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


@dataclass
class StepContext:
    """What the parts of a step share; made once, with the engine. `forecast` is beside the step's
    own stream until its first choice of experts.

    `used` int32 [L * K] and `routed` int32 [n, L, K] note the experts, flat ids, of the last single
    token and of the last ones of many, for a predictor; None without one.

    Between steps `observer` may be set, to see the routing, and `replayed`, to choose the experts
    of single tokens in the place of the router.
    """

    pool: ExpertPool
    routing: Routing
    forecast: Beside
    prefetch: Prefetch | None = None
    eviction: Eviction | None = None  # by a forecast
    step_forecast: StepForecast | None = None  # for prefetches beyond the layers of look-ahead
    used: torch.Tensor | None = None
    routed: torch.Tensor | None = None
    observer: RoutingObserver | None = None
    replayed: ReplayedRouting | None = None

    @property
    def expected_use(self) -> ExpectedUse | None:
        """By which victims are chosen; None: by the pool's own scores."""
        return None if self.eviction is None else self.eviction.expected_use

    @property
    def recorded(self) -> RecordedIds | None:
        """Experts to choose in the place of the router's."""
        return None if self.replayed is None else self.replayed.recorded

    @property
    def predicted(self) -> RecordedIds | None:
        """Experts to predict in the place of look-ahead's."""
        return None if self.replayed is None else self.replayed.predicted

    @property
    def candidates(self) -> StepForecast | None:
        """From which candidates for prefetches are picked when a step begins."""
        replayed = None if self.replayed is None else self.replayed.step_forecast
        return replayed or self.step_forecast

    @property
    def kind(self) -> tuple[bool, bool]:
        """What makes a step another one, with other kernels: whether prefetch is on, and whether a
        forecast chooses victims."""
        return self.pool.flights is not None, self.expected_use is not None

    @property
    def is_forecast_wanted(self) -> bool:
        """By eviction, or by a prefetch, as far as they do not rest."""
        prefetches, evicts = self.kind
        return evicts or (prefetches and self.step_forecast is not None)


class PooledExperts:
    """Called by a decoder for each layer; see `Experts` in `models/decoder.py`.

    The bits of the result do not depend on the pool: every (token, expert) pair is computed in the
    same way wherever its record lies, and the pairs of a token are added up in the router's order.
    """

    def __init__(self, context: StepContext, formats: Sequence[ExpertFormat]) -> None:
        self._context, self._formats = context, formats

    def __call__(
        self, layer: int, x: torch.Tensor, h: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """x, h [T, H], the router's logits [T, E] -> x plus the chosen experts over h, [T, H]. For
        one token, those of later routers may follow."""
        if x.shape[0] == 1:
            return self._one(layer, x, h, logits)
        return self._many(layer, x, h, logits)

    def _one(
        self, layer: int, x: torch.Tensor, h: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """One token: its K experts are distinct and fit any pool, and nothing is waited for."""
        context, pool = self._context, self._context.pool
        num_experts, flights = context.routing.num_experts, pool.flights
        prefetch = context.prefetch if flights is not None else None
        handover = None if prefetch is None else prefetch.handover
        context.forecast.join()
        chosen = choose(
            logits[:, :num_experts] if handover is None else logits,
            layer,
            context.routing,
            pool.state,
            context.recorded,
            flights,
            context.expected_use,
            context.used if handover is None else handover.used,
            handover,
        )
        if context.observer is not None:
            ids = chosen.wanted - layer * num_experts
            context.observer(layer, ids.unsqueeze(0), chosen.weights.unsqueeze(0))
        begun = None if handover is None else handover.free_behind(layer)
        pool.fetch(chosen.wanted, chosen.resolved, begun)
        if prefetch is not None and not x.is_cuda:  # on a CPU nothing runs beside the layers
            prefetch.ask(context)
        return expert_mlp(x, h, pool.slots, chosen.resolved, chosen.weights, self._formats[layer])

    def _many(
        self, layer: int, x: torch.Tensor, h: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        context, (num_experts, top_k, renormalize) = self._context, self._context.routing
        ids, weights = route(logits, top_k, renormalize)
        if context.observer is not None:
            context.observer(layer, ids, weights)
        first = layer * num_experts
        if context.routed is not None:
            last = ids[-len(context.routed) :]
            context.routed[-len(last) :, layer] = last + first
        pairs = torch.empty((*ids.shape, h.shape[1]), dtype=torch.float32, device=h.device)
        for wave in self._waves(ids, first):
            slots = context.pool.require(wave)
            slot_of = slots.new_full((num_experts,), -1)
            slot_of[wave.long() - first] = slots
            expert_pairs(h, context.pool.slots, slot_of[ids.long()], self._formats[layer], pairs)
        return x + combine(pairs, weights, h.dtype)

    def _waves(self, ids: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
        """The distinct experts of many tokens in groups that fit the pool, residents first. What is
        fetched and not used by the last tokens is the next to leave: so a prompt that wants nearly
        all experts goes through a part of the pool, and what answers live on stays."""
        pool = self._context.pool
        wanted = torch.unique(ids) + first  # sorted
        resident = pool.is_resident(wanted)
        here, absent = wanted[resident], wanted[~resident]
        if len(here):
            yield from torch.split(here, min(pool.largest_event, MAX_WAVE))
        size, last = min(-(-pool.num_slots // 4), MAX_WAVE), ids[-SEED_TOKENS:] + first
        for wave in torch.split(absent, size) if len(absent) else ():
            yield wave
            pool.demote(wave[~torch.isin(wave, last)])
