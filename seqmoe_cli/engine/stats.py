"""What a turn cost. `FIGURES` names every figure that is shown, once: the status line, /stats,
`--json` and the bench take them from here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from seqmoe_cli.residency.stats import StepStats, ratio


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
    """The steps of one answer added up, those of the prompt and those behind it."""

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

    @classmethod
    def sum(cls, turns: Iterable[TurnStats]) -> TurnStats:
        """Several answers together."""
        total = cls()
        for turn in turns:
            total.prompt_tokens += turn.prompt_tokens
            total.completion_tokens += turn.completion_tokens
            total.prefill += turn.prefill
            total.decode += turn.decode
        return total

    @property
    def total(self) -> StepStats:
        """Prompt and answer together."""
        return self.prefill + self.decode


class Figure(NamedTuple):
    """A figure of a turn: `value` of its steps in `phase` ("prefill", "decode" or "total"), in
    `unit`: "tokens", "count", "number", "per token", "share" (from 0 to 1), "bytes", "bytes/s",
    "tok/s" or "s". `key` is its name in `--json`, `title` the one in /stats, empty where it is not
    shown. `needs`: only shown with "prefetch", or with eviction by a "forecast"."""

    key: str
    title: str
    unit: str
    phase: str
    value: Callable[[StepStats], float | None]
    needs: str = ""

    def of(self, turn: TurnStats) -> float | None:
        steps: StepStats = getattr(turn, self.phase)
        return self.value(steps)


FIGURES = (
    Figure("tokens_per_second", "tok/s", "tok/s", "decode", lambda s: s.tokens_per_second),
    Figure("prefill_tokens_per_second", "prompt tok/s", "tok/s", "prefill",
           lambda s: s.tokens_per_second),
    Figure("prefill_seconds", "", "s", "prefill", lambda s: s.elapsed_s),
    Figure("decode_seconds", "", "s", "decode", lambda s: s.elapsed_s),
    Figure("hit_rate", "hit", "share", "total", lambda s: s.hit_rate),
    Figure("decode_hit_rate", "", "share", "decode", lambda s: s.hit_rate),
    Figure("hits", "", "count", "total", lambda s: s.hits),
    Figure("misses", "", "count", "total", lambda s: s.misses),
    Figure("misses_per_token", "miss/tok", "number", "decode", lambda s: s.misses_per_token),
    Figure("fetched_bytes", "fetched", "bytes", "total", lambda s: s.fetched_bytes),
    Figure("fetch_bytes_per_s", "fetch", "bytes/s", "total",
           lambda s: ratio(s.moved_bytes, s.elapsed_s)),
    Figure("prefetch_hits", "prefetch hits", "count", "total",
           lambda s: s.prefetch_hits, "prefetch"),
    Figure("prefetched_bytes", "prefetched", "bytes", "total",
           lambda s: s.prefetched_bytes, "prefetch"),
    Figure("prefetches_late", "", "count", "decode", lambda s: s.prefetches_late),
    Figure("prefetches_dropped", "", "count", "decode", lambda s: s.prefetches_dropped),
    Figure("prefetch_rested_tokens", "prefetch off", "tokens", "decode",
           lambda s: s.prefetch_rested_tokens, "prefetch"),
    Figure("eviction_saved_misses", "misses saved", "per token", "decode",
           lambda s: s.eviction_saved_misses, "forecast"),
    Figure("eviction_rested_tokens", "forecast off", "tokens", "decode",
           lambda s: s.eviction_rested_tokens, "forecast"),
)  # fmt: skip
BY_KEY = {figure.key: figure for figure in FIGURES}
