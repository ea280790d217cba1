"""The rows of `seqmoe bench` for people: two tables, and what they rest on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from seqmoe_cli.bench.inventory import readable_count
from seqmoe_cli.bench.rows import pool_name
from seqmoe_cli.terminal.table import Column, Row, filled, markdown
from seqmoe_weights.files import readable_size


def _model(row: Row) -> str:
    name = str(row["model_filename"])
    return f"{name} (random weights)" if row["weights"] == "random" else name


def _pool(row: Row) -> str:
    return pool_name(row["pool"], row["policy"], row["prefetch"])


COLUMNS = (
    Column("model", _model, left=True),
    Column("size", lambda row: readable_size(row["model_size"])),
    Column("params", lambda row: readable_count(row["model_n_params"])),
    Column("device", lambda row: f"{row['device']} {row['dtype']}", left=True),
    Column("pool", _pool, left=True, width=7),
    Column("slots", "num_slots", ",", width=6),
    Column("test", "test", left=True, width=13),
    Column("state", "state", left=True, width=5),
    Column("t/s", lambda row: f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}", width=18),
    Column("hit %", "hit_rate", ".1f", 100, width=5),
    Column("miss/tok", "misses_per_token", ".2f", width=8),
    Column("host GB/s", "fetch_gb_per_s", ".2f", width=9),
)
# Where the time goes; a column without a value in any row is left out.
TIME_COLUMNS = (
    *(column for column in COLUMNS if column.title in ("pool", "test", "state")),
    Column("% of full load", "share_of_full_load", ",.1f", 100),
    Column("ms/tok", "ms_per_token", ",.3f"),
    Column("compute", "compute_ms", ",.3f"),
    Column("stall", "stall_ms", ",.3f"),
    Column("gap", "gap_ms", ",.3f"),
    Column("MB read/tok", "bytes_read_per_token", ",.1f", 1e-6),
    Column("read GB/s", "read_gb_per_s", ",.1f"),
    Column("% of copy", "share_of_copy", ",.1f", 100),
    Column("stall GB/s", "stall_gb_per_s", ",.1f"),
    Column("% of link", "share_of_link", ",.1f", 100),
    Column("prefetched/tok", "prefetches_per_token", ",.2f"),
    Column("in time", "prefetch_hits_per_token", ",.2f"),
    Column("late", "prefetches_late_per_token", ",.2f"),
    Column("dropped", "prefetches_dropped_per_token", ",.2f"),
    Column("saved %", "prefetch_saved", ",.1f", 100),
    Column("forecast saves", "eviction_saved_misses", ",.2f"),
    Column("kernels/tok", "kernels_per_token", ",.0f"),
)


def report(rows: Iterable[Row], known: Mapping[str, Sequence[str]] | None = None) -> Iterator[str]:
    """A table for people, and one of where the time of generated tokens goes; what was timed, and
    the build, stand under them. `known`: see `markdown`."""
    seen: list[Row] = []

    def kept() -> Iterator[Row]:
        for row in rows:
            seen.append(row)
            yield row

    yield from markdown(COLUMNS, kept(), known)
    generated = [row for row in seen if row["n_gen"]]
    if generated:
        yield from ("", f"where the time goes, ms per token: {_model(generated[-1])}", "")
        yield from markdown(filled(TIME_COLUMNS, generated), generated)
    if seen:
        yield ""
        for row in generated:
            yield from _prefetch(row)
        yield from _notes(seen[-1])


def _prefetch(row: Row) -> Iterator[str]:
    saved, place = row["prefetch_saved"], f"pool {_pool(row)}, {row['state']}"
    if saved is not None:
        than = f"{100 * abs(saved):.1f} % {'shorter' if saved > 0 else 'longer'} than without"
        switch = "leave it on" if row["prefetch_pays"] else "turn it off"
        yield f"prefetch, {place}: a step is {than}; a chat would {switch}"
    recall, precision = row["look_ahead_recall"], row["look_ahead_precision"]
    if recall and precision:
        pairs = (f"{100 * r:.1f}/{100 * p:.1f}" for r, p in zip(recall, precision, strict=True))
        simulated = "simulated " * (row["look_ahead"] == "simulated")
        yield (
            f"{simulated}look-ahead, {place}: recall of misses/precision of names 1, 2, ... layers "
            f"ahead: {', '.join(pairs)} %"
        )


def _notes(row: Row) -> Iterator[str]:
    yield f"text: {row['prompt_source']}; timed with sampling: {row['sampling']}"
    if row["weights"] == "random":
        yield "weights: random; sizes and work are those of the shape, the text means nothing"
    if row["trace"]:
        yield (
            f"routing: replayed from trace {row['trace']}, {row['n_expert_used']} of "
            f"{row['n_expert']} experts of a layer; {row['n_untimed']} tokens before those timed"
        )
    if row["verify"]:
        yield "pool: every slot verified"
    if row["predictor"]:
        yield f"predictor: {row['predictor']}"
    if row["copy_gb_per_s"] and row["link_gb_per_s"]:
        yield (
            f"measured: memory copy {row['copy_gb_per_s']:,.0f} GB/s, "
            f"link {row['link_gb_per_s']:.1f} GB/s"
        )
    yield f"build: {row['build_commit']}; {row['gpu_info'] or row['cpu_info']}"
    yield from (f"note: {fallback}" for fallback in row["fallbacks"])
