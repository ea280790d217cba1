"""What a step and a turn cost: every figure that is shown anywhere comes from here."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from seqmoe_cli.residency.eviction import EvictionCosts
from seqmoe_cli.residency.switch import StepCosts

if TYPE_CHECKING:
    from seqmoe_cli.residency.pool import PoolCounters


@dataclass(frozen=True)
class StepStats:
    """Costs of one step, or of several added up. `num_tokens` went into the KV state; hits and
    misses count (layer, expert) lookups, in a prefill chunk once per distinct expert.

    `prefetch_hits` are hits that a prefetch in time has made of misses; `prefetches_late` misses
    for which a copy under way was waited for, `prefetches_dropped` those that it was too late for;
    `rested_tokens` were decoded while prefetch was turned off, to compare or as it did not pay.
    Of the steps before (a step is compared when the next one begins) `missed_by_forecast` and
    `missed_by_counts`: see `PoolCounters`; `unforeseen_tokens` were decoded while eviction by a
    forecast was turned off.

    `elapsed_s` is the host's time. By the device's clock: `stall_s` it waited for misses, decode
    steps took `step_s` from end to end and lay `gap_s` apart.
    """

    phase: str  # "prefill" or "decode"
    num_tokens: int = 0
    hits: int = 0
    misses: int = 0
    fetched_bytes: int = 0
    elapsed_s: float = 0.0
    stall_s: float = 0.0
    step_s: float = 0.0
    gap_s: float = 0.0
    prefetched_bytes: int = 0
    prefetch_hits: int = 0
    prefetches_late: int = 0
    prefetches_dropped: int = 0
    rested_tokens: int = 0
    missed_by_forecast: int = 0
    missed_by_counts: int = 0
    unforeseen_tokens: int = 0

    @classmethod
    def of(
        cls,
        phase: str,
        num_tokens: int,
        spent: PoolCounters,
        record_bytes: int,
        rests: bool,
        is_unforeseen: bool = False,
    ) -> StepStats:
        """What a pool has counted meanwhile; `rests`: without the prefetch that there is;
        `is_unforeseen`: without the eviction by a forecast."""
        return cls(
            phase,
            num_tokens,
            spent.hits,
            spent.misses,
            spent.fetched * record_bytes,
            prefetched_bytes=spent.prefetched * record_bytes + spent.cut_bytes,
            prefetch_hits=spent.prefetch_hits,
            prefetches_late=spent.late,
            prefetches_dropped=spent.dropped,
            rested_tokens=num_tokens * rests,
            missed_by_forecast=spent.missed_by_forecast,
            missed_by_counts=spent.missed_by_counts,
            unforeseen_tokens=num_tokens * is_unforeseen,
            stall_s=spent.stall_ns / 1e9,
            step_s=spent.step_ns / 1e9,
            gap_s=spent.gap_ns / 1e9,
        )

    def __add__(self, other: StepStats) -> StepStats:
        names = [field.name for field in fields(self) if field.name != "phase"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return StepStats(self.phase, **sums)

    @property
    def hit_rate(self) -> float:
        """hits / (hits + misses), from 0 to 1; 0 when nothing was looked up."""
        return _ratio(self.hits, self.hits + self.misses)

    def prefetch_costs(self, record_bytes: int) -> StepCosts:
        """What prefetch is judged by; of decode steps."""
        return StepCosts(
            copies=self.prefetched_bytes // record_bytes,
            used=self.prefetch_hits + self.prefetches_late,
            absent=self.misses + self.prefetch_hits,
            stall_s=self.stall_s,
            step_s=self.step_s,
            steps=self.num_tokens,
        )

    @property
    def eviction_costs(self) -> EvictionCosts:
        """What eviction by a forecast is judged by; of decode steps."""
        return EvictionCosts(
            self.misses + self.prefetch_hits,
            self.missed_by_forecast,
            self.missed_by_counts,
            self.stall_s,
            self.step_s,
            self.num_tokens,
        )

    @property
    def eviction_saved_misses(self) -> float | None:
        """Misses that eviction by a forecast saved, per step that had it; below 0 if it cost some,
        None if nothing was compared."""
        if not self.missed_by_counts + self.missed_by_forecast:
            return None
        saved = self.missed_by_counts - self.missed_by_forecast
        return _ratio(saved, self.num_tokens - self.unforeseen_tokens)


@dataclass(frozen=True)
class Step:
    """One item of a stream of generated tokens, with its own costs.

    `token_id` is None only on a last step that carries no token. `finish_reason` is set on the
    last step alone: "stop" (a stop token, which is not delivered), "length" or "interrupted".
    """

    token_id: int | None
    finish_reason: str | None
    stats: StepStats


@dataclass
class TurnStats:
    """The steps of one answer added up."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    prefill: StepStats = field(default_factory=lambda: StepStats("prefill"))
    decode: StepStats = field(default_factory=lambda: StepStats("decode"))

    def add(self, step: Step) -> None:
        """Count one step."""
        if step.stats.phase == "prefill":
            self.prefill += step.stats
        else:
            self.decode += step.stats
        self.completion_tokens += step.token_id is not None
        self.finish_reason = step.finish_reason

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that were evaluated; the others were still in the KV state."""
        return self.prefill.num_tokens

    @property
    def hits(self) -> int:
        return self.prefill.hits + self.decode.hits

    @property
    def misses(self) -> int:
        return self.prefill.misses + self.decode.misses

    @property
    def fetched_bytes(self) -> int:
        return self.prefill.fetched_bytes + self.decode.fetched_bytes

    @property
    def prefetched_bytes(self) -> int:
        return self.prefill.prefetched_bytes + self.decode.prefetched_bytes

    @property
    def prefetch_hits(self) -> int:
        """Hits that would have been misses without prefetch."""
        return self.prefill.prefetch_hits + self.decode.prefetch_hits

    @property
    def hit_rate(self) -> float:
        """hits / (hits + misses) over the prompt and the answer together."""
        return _ratio(self.hits, self.hits + self.misses)

    @property
    def decode_hit_rate(self) -> float:
        """hits / (hits + misses) over the decode steps."""
        return self.decode.hit_rate

    @property
    def misses_per_token(self) -> float:
        """Misses per decode step."""
        return _ratio(self.decode.misses, self.decode.num_tokens)

    @property
    def prefill_s(self) -> float:
        return self.prefill.elapsed_s

    @property
    def decode_s(self) -> float:
        return self.decode.elapsed_s

    @property
    def tokens_per_second(self) -> float:
        """Decode steps per second."""
        return _ratio(self.decode.num_tokens, self.decode_s)

    @property
    def prefill_tokens_per_second(self) -> float:
        return _ratio(self.prefilled_tokens, self.prefill_s)

    @property
    def fetch_bytes_per_s(self) -> float:
        """Bytes fetched and prefetched per second of the whole turn."""
        num_bytes = self.fetched_bytes + self.prefetched_bytes
        return _ratio(num_bytes, self.prefill_s + self.decode_s)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
