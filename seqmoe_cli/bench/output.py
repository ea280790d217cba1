"""The output formats of `seqmoe bench`: each turns a stream of rows into a stream of lines.

All but JSON give a row's line as soon as the row is there; a JSON array needs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from seqmoe_cli.bench.inventory import readable_count
from seqmoe_cli.bench.rows import Row, pool_name
from seqmoe_cli.terminal.formats import csv_lines, json_array, json_lines
from seqmoe_weights.files import readable_size


@dataclass(frozen=True)
class Column:
    """A column of a table: text is left-aligned, numbers are right-aligned."""

    title: str
    cell: Callable[[Row], str]
    width: int = 0  # smallest width; rows printed as they come cannot all be looked at for it
    number: bool = True

    def align(self, text: str, width: int) -> str:
        return text.rjust(width) if self.number else text.ljust(width)


def _model(row: Row) -> str:
    setting = row.setting
    random = setting.weights == "random"
    return f"{setting.model_filename} (random weights)" if random else setting.model_filename


def _pool(row: Row) -> str:
    return pool_name(row.setting.pool, row.setting.policy, row.setting.prefetch)


def _number(value: float | None, digits: int = 2, factor: float = 1) -> str:
    return "" if value is None else f"{factor * value:,.{digits}f}"


COLUMNS = (
    Column("model", _model, number=False),
    Column("size", lambda row: readable_size(row.setting.model_size)),
    Column("params", lambda row: readable_count(row.setting.model_n_params)),
    Column("device", lambda row: f"{row.setting.device} {row.setting.dtype}", number=False),
    Column("pool", _pool, 7, number=False),
    Column("slots", lambda row: f"{row.setting.num_slots:,}", 6),
    Column("test", lambda row: row.test, 13, number=False),
    Column("state", lambda row: row.state, 5, number=False),
    Column("t/s", lambda row: f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}", 18),
    Column("hit %", lambda row: f"{100 * row.hit_rate:.1f}", 5),
    Column("miss/tok", lambda row: f"{row.misses_per_token:.2f}", 8),
    Column("host GB/s", lambda row: f"{row.fetch_gb_per_s:.2f}", 9),
)
# Where the time goes; a column without a value in any row is left out.
TIME_COLUMNS = (
    *(column for column in COLUMNS if column.title in ("pool", "test", "state")),
    Column("% of full load", lambda row: _number(row.share_of_full_load, 1, 100)),
    Column("ms/tok", lambda row: _number(row.ms_per_token, 3)),
    Column("compute", lambda row: _number(row.breakdown.compute_ms, 3)),
    Column("stall", lambda row: _number(row.breakdown.stall_ms, 3)),
    Column("gap", lambda row: _number(row.breakdown.gap_ms, 3)),
    Column("MB read/tok", lambda row: _number(row.breakdown.bytes_read_per_token, 1, 1e-6)),
    Column("read GB/s", lambda row: _number(row.breakdown.read_gb_per_s, 1)),
    Column("% of copy", lambda row: _number(row.breakdown.share_of_copy, 1, 100)),
    Column("stall GB/s", lambda row: _number(row.breakdown.stall_gb_per_s, 1)),
    Column("% of link", lambda row: _number(row.breakdown.share_of_link, 1, 100)),
    Column("prefetched/tok", lambda row: _number(row.breakdown.prefetches_per_token)),
    Column("in time", lambda row: _number(row.breakdown.prefetch_hits_per_token)),
    Column("late", lambda row: _number(row.breakdown.prefetches_late_per_token)),
    Column("dropped", lambda row: _number(row.breakdown.prefetches_dropped_per_token)),
    Column("saved %", lambda row: _number(row.breakdown.prefetch_saved, 1, 100)),
    Column("forecast saves", lambda row: _number(row.breakdown.eviction_saved_misses)),
    Column("kernels/tok", lambda row: _number(row.breakdown.kernels_per_token, 0)),
)


def markdown(
    rows: Iterable[Row], coming: Mapping[str, Sequence[str]] | None = None
) -> Iterator[str]:
    """A table for people, and one of where the time of generated tokens goes; what was timed, and
    the build, stand under them. `coming`: by title, the cells of a column as far as they are known
    before the rows are."""
    widths: list[int] = []
    seen: list[Row] = []
    for row in rows:
        seen.append(row)
        cells = [column.cell(row) for column in COLUMNS]
        if not widths:
            first = zip(COLUMNS, cells, strict=True)
            known = [[cell, *(coming or {}).get(column.title, ())] for column, cell in first]
            widths = _widths(COLUMNS, known)
            yield from _head(COLUMNS, widths)
        yield _line(COLUMNS, cells, widths)
    if seen:
        yield from _times([row for row in seen if row.n_gen])
        yield ""
        for row in seen:
            yield from _prefetch(row)
        yield from _notes(seen[-1])


def _times(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    table = [[column.cell(row) for column in TIME_COLUMNS] for row in rows]
    kept = [i for i in range(len(TIME_COLUMNS)) if any(cells[i] for cells in table)]
    columns = [TIME_COLUMNS[i] for i in kept]
    table = [[cells[i] for i in kept] for cells in table]
    widths = _widths(columns, list(zip(*table, strict=True)))
    yield ""
    yield f"where the time goes, ms per token: {_model(rows[-1])}"
    yield ""
    yield from _head(columns, widths)
    yield from (_line(columns, cells, widths) for cells in table)


def _prefetch(row: Row) -> Iterator[str]:
    saved, pays = row.breakdown.prefetch_saved, row.breakdown.prefetch_pays
    if saved is not None:
        than = f"{100 * abs(saved):.1f} % {'shorter' if saved > 0 else 'longer'} than without"
        switch = "leave it on" if pays else "turn it off"
        yield f"prefetch, pool {_pool(row)}, {row.state}: a step is {than}; a chat would {switch}"
    recall, precision = row.breakdown.look_ahead_recall, row.breakdown.look_ahead_precision
    if recall and precision:
        pairs = (f"{100 * r:.1f}/{100 * p:.1f}" for r, p in zip(recall, precision, strict=True))
        who = "simulated look-ahead" if row.setting.look_ahead == "simulated" else "look-ahead"
        where = f"{who}, pool {_pool(row)}, {row.state}"
        yield (
            f"{where}: recall of misses/precision of names 1, 2, ... layers ahead: "
            f"{', '.join(pairs)} %"
        )


def _notes(row: Row) -> Iterator[str]:
    setting = row.setting
    yield f"text: {setting.prompt_source}; timed with sampling: {setting.sampling}"
    if setting.weights == "random":
        yield "weights: random; sizes and work are those of the shape, the text means nothing"
    if setting.trace:
        yield (
            f"routing: replayed from trace {setting.trace}, {setting.n_expert_used} of "
            f"{setting.n_expert} experts of a layer; {row.n_untimed} tokens before those timed"
        )
    if setting.verify:
        yield "pool: every slot verified"
    if setting.predictor:
        yield f"predictor: {setting.predictor}"
    if setting.copy_gb_per_s and setting.link_gb_per_s:
        yield (
            f"measured: memory copy {setting.copy_gb_per_s:,.0f} GB/s, "
            f"link {setting.link_gb_per_s:.1f} GB/s"
        )
    yield f"build: {setting.build_commit}; {setting.gpu_info or setting.cpu_info}"
    yield from (f"note: {fallback}" for fallback in setting.fallbacks)


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> list[int]:
    """Of each column, given its cells."""
    return [
        max(column.width, len(column.title), *map(len, texts))
        for column, texts in zip(columns, cells, strict=True)
    ]


def _head(columns: Sequence[Column], widths: Sequence[int]) -> Iterator[str]:
    yield _line(columns, [column.title for column in columns], widths)
    yield _line(columns, [_rule(*pair) for pair in zip(columns, widths, strict=True)], widths)


def _line(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        column.align(cell, width)
        for column, cell, width in zip(columns, cells, widths, strict=True)
    )
    return "| " + " | ".join(padded) + " |"


def _rule(column: Column, width: int) -> str:
    return "-" * (width - 1) + ":" if column.number else ":" + "-" * (width - 1)


FORMATS: dict[str, Callable[[Iterable[Row]], Iterator[str]]] = {
    "md": markdown,
    "csv": csv_lines,
    "json": json_array,
    "jsonl": json_lines,
}
