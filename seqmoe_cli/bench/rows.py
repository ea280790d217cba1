"""One row of results: llama-bench's key names, what an expert pool adds, and where the time goes.

Imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from seqmoe_cli.bench.matrix import Case
from seqmoe_cli.residency.stats import StepStats
from seqmoe_cli.residency.switch import PrefetchVerdict


@dataclass(frozen=True)
class Sample:
    """One timed repetition: wall time of the run, sampling included, and what its steps cost."""

    elapsed_ns: int
    total: StepStats

    @property
    def tokens_per_second(self) -> float:
        return self.total.num_tokens * 1e9 / self.elapsed_ns


def pool_name(pool: str, policy: str, prefetch: str) -> str:
    """The size of a pool, and what is not as usual."""
    ways = ((policy, "lru"), (prefetch, "off"))
    return " ".join([pool, *(way for way, usual in ways if way != usual)])


@dataclass(frozen=True)
class Setting:
    """What all rows of one opened engine share; the names are those of the JSON keys.

    `weights` is "random" or "packed"; `model_size` is the bytes of all weights, `model_n_params`
    their number; `n_expert_used` of `n_expert` experts of a layer serve a token; `trace` names the
    routing that is replayed, empty when the router chooses. `pool` is the flag as typed,
    `pool_bytes` and `num_slots` what it came to, `pool_share` the slots' share of all experts, from
    0 to 1; `prefetch` is "off", "lookahead" or "full", `prefetch_by` then says who copies, "gpu" or
    "thread", and `look_ahead` who names the experts: "routers", or "simulated" from a trace;
    `predictor` says where the one that runs along comes from, empty without one; `verify` says that
    every slot read was verified, which takes time; `fallbacks` holds a sentence for everything that
    could not be done as asked. `copy_gb_per_s` and `link_gb_per_s` are the machine's ceilings, None
    on a CPU.
    """

    model_filename: str
    model_type: str
    weights: str
    model_size: int
    model_n_params: int
    n_expert: int
    n_expert_used: int
    trace: str
    device: str
    dtype: str
    pool: str
    pool_bytes: int
    num_slots: int
    pool_share: float
    n_ctx: int
    verify: bool
    policy: str
    prefetch: str
    prefetch_by: str
    look_ahead: str
    predictor: str
    sampling: str
    prompt_source: str
    cpu_info: str
    gpu_info: str
    driver: str
    torch: str
    triton: str
    build_commit: str
    copy_gb_per_s: float | None
    link_gb_per_s: float | None
    fallbacks: list[str]


@dataclass(frozen=True)
class Breakdown:
    """Where the time of a generated token goes, in milliseconds, by the device's clock: computing,
    waiting for misses, and between the steps; and how that compares with the ceilings.

    Records prefetched, and what became of them: a hit, waited for, too late. Look-ahead 1, 2, ...
    layers ahead: the share of would-be misses that it named, and of named absent experts that were
    used. None without prefetch. Timed runs have it on all the time; `prefetch_saved` is the share
    of a step's time that it saves, compared with the row without it, and `prefetch_pays` says
    whether the switch of a chat would leave it on for that. None where there is no such row.
    `eviction_saved_misses` is what eviction by a forecast saves a token, as counted beside it,
    compared with one by decayed counts; None without a forecast.

    `bytes_read_per_token` of the device's memory, `read_gb_per_s` while it computes,
    `stall_gb_per_s` over the link while it waits. Shares are from 0 to 1, None without a ceiling.
    """

    compute_ms: float | None = None
    stall_ms: float | None = None
    gap_ms: float | None = None
    bytes_read_per_token: int | None = None
    read_gb_per_s: float | None = None
    share_of_copy: float | None = None
    stall_gb_per_s: float | None = None
    share_of_link: float | None = None
    kernels_per_token: int | None = None
    prefetches_per_token: float | None = None
    prefetch_hits_per_token: float | None = None
    prefetches_late_per_token: float | None = None
    prefetches_dropped_per_token: float | None = None
    prefetch_saved: float | None = None
    prefetch_pays: bool | None = None
    eviction_saved_misses: float | None = None
    look_ahead_recall: list[float] | None = None
    look_ahead_precision: list[float] | None = None


@dataclass(frozen=True)
class Row:
    """A case in one `state` of the pool, `cold` or `warm`; `bytes_fetched` and `bytes_prefetched`
    are means of a repetition, `hit_rate` and `misses_per_token` are taken over all of them.
    `n_untimed` steps came before the timed ones. `share_of_full_load` compares `avg_ts` with that
    of the row whose pool held all experts; None where the run has no such row yet."""

    setting: Setting
    n_prompt: int
    n_gen: int
    n_depth: int
    n_untimed: int
    test: str
    state: str
    test_time: str
    avg_ns: int
    stddev_ns: int
    avg_ts: float
    stddev_ts: float
    samples_ns: list[int]
    samples_ts: list[float]
    hit_rate: float
    misses_per_token: float
    bytes_fetched: int
    bytes_prefetched: int
    fetch_gb_per_s: float
    ms_per_token: float
    share_of_full_load: float | None
    breakdown: Breakdown

    def to_dict(self) -> dict[str, object]:
        """The row as one flat object: the setting's keys first, the breakdown's last."""
        own = asdict(self)
        setting, breakdown = own.pop("setting"), own.pop("breakdown")
        return {**setting, **own, **breakdown}


def make_row(
    setting: Setting,
    case: Case,
    state: str,
    test_time: str,
    samples: Sequence[Sample],
    *,
    full_ts: float | None = None,
    bytes_read: int = 0,
    num_kernels: int | None = None,
    accuracy: Sequence[tuple[int, int, int]] | None = None,
    plain_step_s: float | None = None,
) -> Row:
    """Sum up the repetitions of one case; the deviation of a single one is 0. `full_ts` is the
    speed with all experts in the pool; `bytes_read` and `num_kernels` are those of a step;
    `accuracy` of look-ahead counts misses, names and both, None without prefetch; `plain_step_s`
    is the time of a step of the same case without prefetch."""
    times = [sample.elapsed_ns for sample in samples]
    rates = [sample.tokens_per_second for sample in samples]
    total = sum((sample.total for sample in samples), StepStats("decode"))
    return Row(
        setting=setting,
        n_prompt=case.num_prompt,
        n_gen=case.num_gen,
        n_depth=case.depth,
        n_untimed=case.num_untimed,
        test=case.name,
        state=state,
        test_time=test_time,
        avg_ns=round(statistics.fmean(times)),
        stddev_ns=round(_stddev(times)),
        avg_ts=mean_rate(samples),
        stddev_ts=_stddev(rates),
        samples_ns=times,
        samples_ts=rates,
        hit_rate=total.hit_rate,
        misses_per_token=total.misses_per_token,
        bytes_fetched=total.fetched_bytes // len(samples),
        bytes_prefetched=total.prefetched_bytes // len(samples),
        # bytes per nanosecond are GB per second
        fetch_gb_per_s=total.moved_bytes / sum(times),
        ms_per_token=sum(times) / total.num_tokens / 1e6,
        share_of_full_load=mean_rate(samples) / full_ts if full_ts else None,
        breakdown=(
            _breakdown(setting, total, bytes_read, num_kernels, accuracy, plain_step_s)
            if case.num_gen
            else Breakdown()
        ),
    )


def mean_rate(samples: Sequence[Sample]) -> float:
    """Tokens per second, mean over the repetitions."""
    return statistics.fmean(sample.tokens_per_second for sample in samples)


def mean_step_s(samples: Sequence[Sample]) -> float:
    """By the device's clock, of one step; mean over the repetitions."""
    total = sum((sample.total for sample in samples), StepStats("decode"))
    return total.step_s / total.num_tokens


def _breakdown(
    setting: Setting,
    total: StepStats,
    bytes_read: int,
    num_kernels: int | None,
    accuracy: Sequence[tuple[int, int, int]] | None,
    plain_step_s: float | None,
) -> Breakdown:
    tokens, compute_s = total.num_tokens, total.compute_s
    read = _gb_per_s(bytes_read * tokens, compute_s)
    stall = _gb_per_s(total.fetched_bytes, total.stall_s)
    return Breakdown(
        compute_ms=1e3 * compute_s / tokens,
        stall_ms=1e3 * total.stall_s / tokens,
        gap_ms=1e3 * total.gap_s / tokens,
        bytes_read_per_token=bytes_read,
        read_gb_per_s=read,
        share_of_copy=_share(read, setting.copy_gb_per_s),
        stall_gb_per_s=stall,
        share_of_link=_share(stall, setting.link_gb_per_s),
        kernels_per_token=num_kernels,
        eviction_saved_misses=total.eviction_saved_misses,
        **({} if accuracy is None else _prefetch(setting, total, accuracy, plain_step_s)),
    )


def _prefetch(
    setting: Setting,
    total: StepStats,
    accuracy: Sequence[tuple[int, int, int]],
    plain_step_s: float | None,
) -> dict[str, Any]:
    tokens, record_bytes = total.num_tokens, setting.pool_bytes // setting.num_slots
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
        "look_ahead_recall": [right / max(missing, 1) for missing, _, right in accuracy],
        "look_ahead_precision": [right / max(named, 1) for _, named, right in accuracy],
    }


def _gb_per_s(num_bytes: int, seconds: float) -> float | None:
    return num_bytes / seconds / 1e9 if num_bytes and seconds > 0 else None


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _stddev(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
