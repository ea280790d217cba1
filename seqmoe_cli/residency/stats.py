"""StepStats: what steps cost, made of the counters that the device keeps. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from seqmoe_kernels.pool.step_ring import VALUE_BITS
from seqmoe_kernels.state import (
    CUT_BYTES,
    DROPPED,
    GAP_NS,
    GAVE_UP,
    HITS,
    LANDED,
    LATE,
    MISSED_BY_COUNTS,
    MISSED_BY_FORECAST,
    MISSES,
    PREFETCH_HITS,
    STALL_NS,
    STEP_NS,
)


@dataclass(frozen=True)
class StepStats:
    """Costs of one step, or of several added up. `num_tokens` went into the KV state; hits and
    misses count (layer, expert) lookups, in a prefill chunk once per distinct expert.

    `prefetch_hits` are hits that a prefetch in time has made of misses; `prefetches_late` misses
    for which a copy under way was waited for, `prefetches_dropped` those that it was too late for.
    `prefetch_rested_tokens` were decoded while prefetch was turned off, `eviction_rested_tokens`
    while eviction by a forecast was: to compare, or because it did not pay.

    Of the steps before (a step is compared when the next one begins): `missed_by_forecast` are
    experts that they lacked where a forecast chose the victims, those included that a prefetch
    brought in time; `missed_by_counts` how many they would have lacked with decayed counts.

    `elapsed_s` is the host's time. By the device's clock: `stall_s` it waited for misses, decode
    steps took `step_s` from end to end and lay `gap_s` apart. `gave_up`: steps whose end the
    prefetch kernels did not see.
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
    prefetch_rested_tokens: int = 0
    missed_by_forecast: int = 0
    missed_by_counts: int = 0
    eviction_rested_tokens: int = 0
    prefetches: int = 0  # records that have landed, whether they were wanted or not
    gave_up: int = 0

    @classmethod
    def between(
        cls,
        before: Sequence[int],
        after: Sequence[int],
        record_bytes: int,
        phase: str,
        num_tokens: int,
        elapsed_s: float,
    ) -> StepStats:
        """What was counted between two states of `PoolState.counters`. They are carried in
        `VALUE_BITS` bits: times less than 39 hours apart."""
        spent = [(b - a) % (1 << VALUE_BITS) for a, b in zip(before, after, strict=True)]
        return cls(
            phase,
            num_tokens,
            hits=spent[HITS],
            misses=spent[MISSES],
            fetched_bytes=(spent[MISSES] - spent[LATE]) * record_bytes,  # late ones were copied
            elapsed_s=elapsed_s,
            stall_s=spent[STALL_NS] / 1e9,
            step_s=spent[STEP_NS] / 1e9,
            gap_s=spent[GAP_NS] / 1e9,
            prefetched_bytes=spent[LANDED] * record_bytes + spent[CUT_BYTES],
            prefetch_hits=spent[PREFETCH_HITS],
            prefetches_late=spent[LATE],
            prefetches_dropped=spent[DROPPED],
            missed_by_forecast=spent[MISSED_BY_FORECAST],
            missed_by_counts=spent[MISSED_BY_COUNTS],
            prefetches=spent[LANDED],
            gave_up=spent[GAVE_UP],
        )

    def __add__(self, other: StepStats) -> StepStats:
        sums = (getattr(self, name) + getattr(other, name) for name in _SUMMED)
        return StepStats(self.phase, *sums)

    @property
    def hit_rate(self) -> float:
        """hits / (hits + misses), from 0 to 1; 0 when nothing was looked up."""
        return ratio(self.hits, self.hits + self.misses)

    @property
    def absent(self) -> int:
        """Misses, and what would have been one without prefetch."""
        return self.misses + self.prefetch_hits

    @property
    def compute_s(self) -> float:
        """Of the device's time, what it did not wait."""
        return self.step_s - self.stall_s

    @property
    def tokens_per_second(self) -> float:
        return ratio(self.num_tokens, self.elapsed_s)

    @property
    def misses_per_token(self) -> float:
        return ratio(self.misses, self.num_tokens)

    @property
    def moved_bytes(self) -> int:
        """Over the link, fetched or prefetched."""
        return self.fetched_bytes + self.prefetched_bytes

    @property
    def eviction_saved_misses(self) -> float | None:
        """Misses that eviction by a forecast saved, per step that had it; below 0 if it cost some,
        None if nothing was compared."""
        if not self.missed_by_counts + self.missed_by_forecast:
            return None
        saved = self.missed_by_counts - self.missed_by_forecast
        return ratio(saved, self.num_tokens - self.eviction_rested_tokens)


_SUMMED = tuple(field.name for field in fields(StepStats) if field.name != "phase")


def ratio(part: float, whole: float) -> float:
    """0 where there is no whole."""
    return part / whole if whole else 0.0
