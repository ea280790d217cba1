"""A study: a trace replayed with every combination of pool size, policy and prefetch; a row for
each. Knows no terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from seqmoe_cli.errors import PromptError, ResourceError
from seqmoe_cli.forecast.trace import DECODE, Trace
from seqmoe_cli.residency.policies import DISCOUNT, HALF_LIFE, Ints
from seqmoe_cli.settings import PoolSize
from tools.simulator.events import TraceEvents
from tools.simulator.flight import PrefetchRules
from tools.simulator.forecast_eviction import Blend, ForecastAt, ForecastEviction
from tools.simulator.forecasts import Blurred, Decayed, Persistence, Popularity, no_forecast
from tools.simulator.link import Link
from tools.simulator.policies import Belady, S3Fifo, WindowedBelady
from tools.simulator.prefetch import (
    Accuracy,
    CandidateSource,
    FullPrefetch,
    LookAhead,
    OraclePrefetch,
)
from tools.simulator.replay import Replayed, replay, slots_for
from tools.simulator.rows import Row
from tools.simulator.scores import DecayedFrequency, Lru, Policy

POLICIES = ("lru", "decayed", "s3fifo", "forecast", "window", "belady")
PREFETCHES = ("off", "lookahead", "full", "oracle")
FORECASTS = ("none", "persistence", "popularity", "decayed", "blurred", "predictor")
MakeForecast = Callable[[Trace, Ints], ForecastAt]
"""Makes a forecast from a whole trace and the numbers of its tokens that are replayed."""
LOOK_AHEAD = ((0.751, 0.680), (0.669, 0.550), (0.613, 0.461), (0.573, 0.399))
"""Recall of misses and precision of copies, 1 to 4 layers ahead, as measured on Qwen3-30B-A3B."""
RECALL = (0.70, 0.60, 0.50, 0.45)


@dataclass(frozen=True)
class Assumptions:
    """The numbers that a study rests on. `step_s`: the time of a token when nothing is missing.
    `precision` empty: recall * K / (K + 3), as if the K + 3 likeliest of a layer were named."""

    step_s: float = 1.7e-3
    link: Link = field(default_factory=Link)
    rules: PrefetchRules = field(default_factory=PrefetchRules)
    look_ahead: tuple[Accuracy, ...] = LOOK_AHEAD
    forecast: str = "blurred"
    predictor: MakeForecast | None = None  # for the forecast of that name
    recall: tuple[float, ...] = RECALL
    precision: tuple[float, ...] = ()
    rare: float = 0.5
    half_life: float = HALF_LIFE
    discount: float = DISCOUNT
    window: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Part:
    """The tokens of a trace that are replayed; the first `skip` of them are not counted."""

    name: str
    routing: TraceEvents
    skip: int
    whole: Trace  # with the tokens that are not replayed
    replayed: Ints  # numbers of tokens of `whole`

    @classmethod
    def of(cls, name: str, trace: Trace, *, prompts: bool, tokens: int | None, skip: int) -> Part:
        """Raises `PromptError` when nothing is left to count."""
        replayed = np.flatnonzero((trace.phase == DECODE) | prompts)[:tokens]
        if len(replayed) <= skip:
            raise PromptError(
                f"trace {name} has {len(replayed):,} tokens to replay, {skip:,} are not counted",
                "lower --skip, raise --tokens, or replay prompts too with --prompts",
            )
        chosen = np.zeros(len(trace), bool)
        chosen[replayed] = True
        return cls(name, TraceEvents(trace.select(chosen)), skip, trace, replayed)


class Study:
    """One trace under one set of assumptions."""

    def __init__(self, part: Part, assumptions: Assumptions) -> None:
        self.part, self.assumptions = part, assumptions
        layer_s = assumptions.step_s / part.routing.num_layers
        self.link = replace(assumptions.link, layer_s=layer_s)
        self._bounds: dict[int, tuple[float, float]] = {}

    def num_slots(self, pool: PoolSize) -> int:
        """Of a pool given as a share, a size or a count; `ResourceError` for one too small."""
        routing = self.part.routing
        num_slots = {
            "all": routing.num_experts,
            "percent": slots_for(routing.trace, pool.value),
            "bytes": int(pool.value / self.link.record_bytes),
            "slots": int(pool.value),
        }[pool.kind]
        if num_slots < routing.trace.top_k:
            raise ResourceError(
                f"--pool {pool.text} is {num_slots:,} slots, a token of {self.part.name} uses "
                f"{routing.trace.top_k} experts of a layer",
                "give a larger pool",
            )
        return min(num_slots, routing.num_experts)

    def row(self, pool: PoolSize, policy: str, prefetch: str) -> Row:
        num_slots = self.num_slots(pool)
        done = self._replay(num_slots, policy, prefetch)
        uses_forecast = policy == "forecast" or prefetch == "full"
        names = {
            "trace": self.part.name,
            "pool": pool.text,
            "policy": f"window {self.assumptions.window}" if policy == "window" else policy,
            "prefetch": prefetch,
            "prefetch_by": "" if prefetch == "off" else self.link.prefetch_by,
            "look_ahead": "simulated" if prefetch in ("lookahead", "full") else "",
            "forecast": self.assumptions.forecast if uses_forecast else "",
        }
        bounds = self._online_and_best(num_slots)
        return Row.of(done, self.part.skip, self.link, bounds, names, num_slots)

    def note(self, policies: Sequence[str], prefetches: Sequence[str]) -> str:
        """The assumptions behind the rows, one line for each."""
        known, link = self.assumptions, self.link
        lines = [
            f"a token without misses {1e3 * known.step_s:g} ms; an expert {link.record_bytes:,} "
            f"bytes, fetched at {link.fetch_bytes_per_s / 1e9:g} GB/s"
        ]
        if set(prefetches) - {"off"}:
            lines.append(
                f"prefetches by {link.prefetch_by}, at most {known.rules.in_flight} under way, at "
                f"{link.copy_bytes_per_s / 1e9:g} GB/s, {1e6 * link.delay_s:g} us after the request"
            )
        if {"lookahead", "full"} & set(prefetches):
            pairs = ", ".join(f"{100 * r:.1f}/{100 * p:.1f}" for r, p in known.look_ahead)
            lines.append(
                f"simulated look-ahead: recall of misses/precision 1 to {len(known.look_ahead)} "
                f"layers ahead {pairs} %"
            )
        if "forecast" in policies or "full" in prefetches:
            lines.append(self._forecast_note())
        return "\n".join(lines)

    def _forecast_note(self) -> str:
        known = self.assumptions
        if known.forecast != "blurred":
            return f"forecast: {known.forecast}"
        return (
            "simulated forecast: recall/precision in steps 1, 2, 3-4, 5-8 "
            + ", ".join(
                f"{100 * r:.0f}/{100 * p:.0f}"
                for r, p in zip(known.recall, self._precision, strict=True)
            )
            + f" %, {known.rare:g} times that for experts not used in 64 tokens"
        )

    @property
    def _precision(self) -> tuple[float, ...]:
        top_k, known = self.part.routing.trace.top_k, self.assumptions
        return known.precision or tuple(r * top_k / (top_k + 3) for r in known.recall)

    def _online_and_best(self, num_slots: int) -> tuple[float, float]:
        """Loads per token of LRU and of Belady, on demand."""
        if num_slots not in self._bounds:
            lru, best = (self._replay(num_slots, name, "off") for name in ("lru", "belady"))
            counted = slice(self.part.skip, None)
            self._bounds[num_slots] = lru.loads_per_token(counted), best.loads_per_token(counted)
        return self._bounds[num_slots]

    def _replay(self, num_slots: int, policy: str, prefetch: str) -> Replayed:
        known = self.assumptions
        blend = None
        if policy == "forecast" or prefetch == "full":
            blend = Blend(self.part.routing.num_experts, self._forecast(), known.half_life)
        made = _policy(policy, self.part.routing, num_slots, blend, known)
        rules = replace(known.rules, source=self._prefetch(prefetch, blend))
        return replay(self.part.routing, num_slots, lambda *_: made, self.link, rules, blend)

    def _forecast(self) -> ForecastAt:
        routing, known = self.part.routing, self.assumptions
        if known.forecast == "blurred":
            return self._blurred
        if known.predictor:
            return known.predictor(self.part.whole, self.part.replayed)
        makers: dict[str, Callable[[TraceEvents], ForecastAt]] = {
            "none": no_forecast,
            "persistence": Persistence,
            "popularity": Popularity,
            "decayed": lambda routing: Decayed(routing, known.half_life),
        }
        return makers[known.forecast](routing)

    @cached_property
    def _blurred(self) -> Blurred:
        routing, known = self.part.routing, self.assumptions
        return Blurred(routing, known.recall, self._precision, known.rare, known.seed)

    def _prefetch(self, name: str, blend: Blend | None) -> CandidateSource | None:
        routing, known = self.part.routing, self.assumptions
        if name == "oracle":
            return OraclePrefetch(routing)
        if name == "off":
            return None
        look_ahead = LookAhead(routing, known.look_ahead, known.seed)
        if name == "lookahead" or blend is None:
            return look_ahead
        return FullPrefetch(routing, look_ahead, blend, known.rules.least)


def _policy(
    name: str, routing: TraceEvents, num_slots: int, blend: Blend | None, known: Assumptions
) -> Policy:
    if name == "forecast" and blend:
        return ForecastEviction(routing.num_layers, blend, known.discount)
    makers: dict[str, Callable[[], Policy]] = {
        "lru": lambda: Lru(routing.num_experts),
        "decayed": lambda: DecayedFrequency(routing.num_experts, known.half_life),
        "s3fifo": lambda: S3Fifo(num_slots),
        "window": lambda: WindowedBelady(routing, known.window, known.half_life),
        "belady": lambda: Belady(routing),
    }
    return makers[name]()
