"""The output formats of `seqmoe bench`: each turns a stream of rows into a stream of lines.

All but JSON give a row's line as soon as the row is there; a JSON array needs all of them.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from seqmoe_cli.bench.inventory import readable_count
from seqmoe_cli.bench.rows import Row
from seqmoe_weights.files import readable_size


@dataclass(frozen=True)
class Column:
    """A column of the table: text is left-aligned, numbers are right-aligned."""

    title: str
    cell: Callable[[Row], str]
    width: int  # smallest width; rows are printed as they come, so it cannot be fitted to all
    number: bool = True

    def align(self, text: str, width: int) -> str:
        return text.rjust(width) if self.number else text.ljust(width)


COLUMNS = (
    Column("model", lambda row: row.setting.model_filename, 0, number=False),
    Column("size", lambda row: readable_size(row.setting.model_size), 0),
    Column("params", lambda row: readable_count(row.setting.model_n_params), 0),
    Column("device", lambda row: f"{row.setting.device} {row.setting.dtype}", 0, number=False),
    Column("pool", lambda row: row.setting.pool, 7, number=False),
    Column("slots", lambda row: f"{row.setting.num_slots:,}", 6),
    Column("test", lambda row: row.test, 13, number=False),
    Column("state", lambda row: row.state, 5, number=False),
    Column("t/s", lambda row: f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}", 18),
    Column("hit %", lambda row: f"{100 * row.hit_rate:.1f}", 5),
    Column("miss/tok", lambda row: f"{row.misses_per_token:.2f}", 8),
    Column("host GB/s", lambda row: f"{row.fetch_gb_per_s:.2f}", 9),
)


def markdown(rows: Iterable[Row]) -> Iterator[str]:
    """A table for people; what was timed, and the build, stand under it."""
    widths: list[int] = []
    row = None
    for row in rows:
        cells = [column.cell(row) for column in COLUMNS]
        if not widths:
            widths = [
                max(column.width, len(column.title), len(cell))
                for column, cell in zip(COLUMNS, cells, strict=True)
            ]
            yield _line([column.title for column in COLUMNS], widths)
            yield _line([_rule(*pair) for pair in zip(COLUMNS, widths, strict=True)], widths)
        yield _line(cells, widths)
    if row is not None:
        setting = row.setting
        yield ""
        yield f"text: {setting.prompt_source}; timed with sampling: {setting.sampling}"
        yield f"build: {setting.build_commit}; {setting.gpu_info or setting.cpu_info}"
        yield from (f"note: {fallback}" for fallback in setting.fallbacks)


def _line(cells: list[str], widths: list[int]) -> str:
    padded = (
        column.align(cell, width)
        for column, cell, width in zip(COLUMNS, cells, widths, strict=True)
    )
    return "| " + " | ".join(padded) + " |"


def _rule(column: Column, width: int) -> str:
    return "-" * (width - 1) + ":" if column.number else ":" + "-" * (width - 1)


def csv_lines(rows: Iterable[Row]) -> Iterator[str]:
    """A header and one line a row; lists are written as JSON inside one field."""
    for index, row in enumerate(rows):
        record = row.to_dict()
        if not index:
            yield _csv_line(list(record))
        yield _csv_line(
            [json.dumps(item) if isinstance(item, list) else item for item in record.values()]
        )


def _csv_line(values: list[object] | list[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(values)
    return buffer.getvalue()


def json_array(rows: Iterable[Row]) -> Iterator[str]:
    """One array of all rows."""
    yield json.dumps([row.to_dict() for row in rows], indent=2, ensure_ascii=False)


def json_lines(rows: Iterable[Row]) -> Iterator[str]:
    """One object a line."""
    for row in rows:
        yield json.dumps(row.to_dict(), ensure_ascii=False)


FORMATS: dict[str, Callable[[Iterable[Row]], Iterator[str]]] = {
    "md": markdown,
    "csv": csv_lines,
    "json": json_array,
    "jsonl": json_lines,
}
