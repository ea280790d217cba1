"""One row of results: llama-bench's key names, and what an expert pool adds. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from seqmoe_cli.bench.matrix import Case


@dataclass(frozen=True)
class Sample:
    """One timed repetition: wall time of the run, sampling included, and the pool's counts."""

    elapsed_ns: int
    num_tokens: int
    hits: int
    misses: int
    fetched_bytes: int


@dataclass(frozen=True)
class Setting:
    """What all rows of one opened engine share; the names are those of the JSON keys.

    `model_size` is the bytes of all weights, `model_n_params` their number; `pool` is the flag as
    typed, `pool_bytes` and `num_slots` what it came to; `fallbacks` holds a sentence for everything
    that could not be done as asked.
    """

    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    device: str
    dtype: str
    pool: str
    pool_bytes: int
    num_slots: int
    n_ctx: int
    sampling: str
    prompt_source: str
    cpu_info: str
    gpu_info: str
    driver: str
    torch: str
    triton: str
    build_commit: str
    fallbacks: list[str]


@dataclass(frozen=True)
class Row:
    """A case in one `state` of the pool, `cold` or `warm`; `bytes_fetched` is the mean of a
    repetition, `hit_rate` and `misses_per_token` are taken over all of them."""

    setting: Setting
    n_prompt: int
    n_gen: int
    n_depth: int
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
    fetch_gb_per_s: float

    def to_dict(self) -> dict[str, object]:
        """The row as one flat object: the setting's keys first."""
        own = asdict(self)
        return {**own.pop("setting"), **own}


def make_row(
    setting: Setting, case: Case, state: str, test_time: str, samples: Sequence[Sample]
) -> Row:
    """Sum up the repetitions of one case; the deviation of a single one is 0."""
    times = [sample.elapsed_ns for sample in samples]
    rates = [sample.num_tokens * 1e9 / sample.elapsed_ns for sample in samples]
    hits = sum(sample.hits for sample in samples)
    misses = sum(sample.misses for sample in samples)
    fetched = sum(sample.fetched_bytes for sample in samples)
    return Row(
        setting=setting,
        n_prompt=case.num_prompt,
        n_gen=case.num_gen,
        n_depth=case.depth,
        test=case.name,
        state=state,
        test_time=test_time,
        avg_ns=round(statistics.fmean(times)),
        stddev_ns=round(_stddev(times)),
        avg_ts=statistics.fmean(rates),
        stddev_ts=_stddev(rates),
        samples_ns=times,
        samples_ts=rates,
        hit_rate=hits / (hits + misses) if hits + misses else 0.0,
        misses_per_token=misses / sum(sample.num_tokens for sample in samples),
        bytes_fetched=fetched // len(samples),
        fetch_gb_per_s=fetched / sum(times),  # bytes per nanosecond are GB per second
    )


def _stddev(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
