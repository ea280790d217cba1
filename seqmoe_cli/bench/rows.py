"""One row of results: a flat object with llama-bench's key names, what an expert pool adds, and
where the time goes. docs/performance.md says what each key means. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from seqmoe_cli.bench.matrix import Case
from seqmoe_cli.residency.stats import StepStats
from seqmoe_cli.residency.switch import PrefetchVerdict
from seqmoe_cli.terminal.table import Row

TIMES = ("compute_ms", "stall_ms", "gap_ms", "bytes_read_per_token", "read_gb_per_s",
         "share_of_copy", "stall_gb_per_s", "share_of_link", "kernels_per_token")  # fmt: skip
PREFETCH = ("prefetches_per_token", "prefetch_hits_per_token", "prefetches_late_per_token",
            "prefetches_dropped_per_token", "prefetch_saved", "prefetch_pays",
            "look_ahead_recall", "look_ahead_precision")  # fmt: skip
"""None in the rows of prompts, and without prefetch."""


@dataclass(frozen=True)
class Sample:
    """One timed repetition: wall time of the run, sampling included, and what its steps cost."""

    elapsed_ns: int
    total: StepStats

    @property
    def tokens_per_second(self) -> float:
        return self.total.num_tokens * 1e9 / self.elapsed_ns


@dataclass(frozen=True)
class Measured:
    """A case in one `state` of the pool, "cold" or "warm", and its repetitions. Beside what its
    steps counted: `bytes_read` of the device's memory and `num_kernels` of a step, and the
    `accuracy` of look-ahead, which counts misses, names and both, by layers ahead; None without
    prefetch."""

    case: Case
    state: str
    samples: Sequence[Sample]
    bytes_read: int = 0
    num_kernels: int | None = None
    accuracy: Sequence[tuple[int, int, int]] | None = None

    @cached_property
    def total(self) -> StepStats:
        return sum((sample.total for sample in self.samples), StepStats("decode"))

    @property
    def mean_rate(self) -> float:
        """Tokens per second, mean over the repetitions."""
        return statistics.fmean(sample.tokens_per_second for sample in self.samples)

    @property
    def mean_step_s(self) -> float:
        """By the device's clock, of one step."""
        return self.total.step_s / self.total.num_tokens

    def row(
        self,
        setting: Row,
        test_time: str,
        full_ts: float | None = None,
        plain_step_s: float | None = None,
    ) -> dict[str, Any]:
        """The sums over the repetitions, behind the keys of `setting`; the deviation of a single
        one is 0. `full_ts` is the speed with all experts in the pool, `plain_step_s` the time of a
        step of the same case without prefetch; None where that is not known."""
        case, total = self.case, self.total
        times = [sample.elapsed_ns for sample in self.samples]
        rates = [sample.tokens_per_second for sample in self.samples]
        row = {
            **setting,
            "n_prompt": case.num_prompt,
            "n_gen": case.num_gen,
            "n_depth": case.depth,
            "n_untimed": case.num_untimed,
            "test": case.name,
            "state": self.state,
            "test_time": test_time,
            "avg_ns": round(statistics.fmean(times)),
            "stddev_ns": round(_stddev(times)),
            "avg_ts": self.mean_rate,
            "stddev_ts": _stddev(rates),
            "samples_ns": times,
            "samples_ts": rates,
            "hit_rate": total.hit_rate,
            "misses_per_token": total.misses_per_token,
            "bytes_fetched": total.fetched_bytes // len(times),
            "bytes_prefetched": total.prefetched_bytes // len(times),
            # bytes per nanosecond are GB per second
            "fetch_gb_per_s": total.moved_bytes / sum(times),
            "ms_per_token": sum(times) / total.num_tokens / 1e6,
            "share_of_full_load": self.mean_rate / full_ts if full_ts else None,
            **dict.fromkeys((*TIMES, *PREFETCH, "eviction_saved_misses")),
        }
        if case.num_gen:
            row |= self._times(setting) | {"eviction_saved_misses": total.eviction_saved_misses}
            row |= self._prefetch(setting, plain_step_s)
        return row

    def _times(self, setting: Row) -> dict[str, Any]:
        """Where the time of a generated token goes, by the device's clock, and how that compares
        with the machine's ceilings."""
        total, tokens = self.total, self.total.num_tokens
        read = _gb_per_s(self.bytes_read * tokens, total.compute_s)
        stall = _gb_per_s(total.fetched_bytes, total.stall_s)
        return {
            "compute_ms": 1e3 * total.compute_s / tokens,
            "stall_ms": 1e3 * total.stall_s / tokens,
            "gap_ms": 1e3 * total.gap_s / tokens,
            "bytes_read_per_token": self.bytes_read,
            "read_gb_per_s": read,
            "share_of_copy": _share(read, setting["copy_gb_per_s"]),
            "stall_gb_per_s": stall,
            "share_of_link": _share(stall, setting["link_gb_per_s"]),
            "kernels_per_token": self.num_kernels,
        }

    def _prefetch(self, setting: Row, plain_step_s: float | None) -> dict[str, Any]:
        """What became of the records prefetched, and what that was worth."""
        if self.accuracy is None:
            return {}
        total, tokens = self.total, self.total.num_tokens
        record_bytes = setting["pool_bytes"] // setting["num_slots"]
        verdict = None
        if plain_step_s is not None:
            verdict = PrefetchVerdict(total, plain_step_s * tokens)
        return {
            "prefetches_per_token": total.prefetched_bytes / record_bytes / tokens,
            "prefetch_hits_per_token": total.prefetch_hits / tokens,
            "prefetches_late_per_token": total.prefetches_late / tokens,
            "prefetches_dropped_per_token": total.prefetches_dropped / tokens,
            "prefetch_saved": None if verdict is None else verdict.saved,
            "prefetch_pays": None if verdict is None else verdict.pays,
            "look_ahead_recall": [right / max(gone, 1) for gone, _, right in self.accuracy],
            "look_ahead_precision": [right / max(named, 1) for _, named, right in self.accuracy],
        }


def pool_name(pool: str, policy: str, prefetch: str) -> str:
    """The size of a pool, and what is not as usual."""
    ways = ((policy, "lru"), (prefetch, "off"))
    return " ".join([pool, *(way for way, usual in ways if way != usual)])


def _gb_per_s(num_bytes: int, seconds: float) -> float | None:
    return num_bytes / seconds / 1e9 if num_bytes and seconds > 0 else None


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _stddev(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
