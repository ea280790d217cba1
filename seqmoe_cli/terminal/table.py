"""Tables: rows as Markdown for people, in columns that are declared once, or as CSV and JSON for
programs. Every format gives a row's line as soon as the row is there; a JSON array needs all of
them. Imports no torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FORMAT_NAMES = ("md", "csv", "json", "jsonl")
Row = Mapping[str, Any]
"""A flat object, with the same keys in all rows of a table."""


@dataclass(frozen=True)
class Column:
    """`value` is a key of a row, or a function of it if rows are not flat objects; None shows as
    nothing. `form` is a format of numbers (".1f"), which are multiplied by `factor` first. Numbers
    are aligned right, text `left`. `width`: the smallest one."""

    title: str
    value: str | Callable[[Any], object]
    form: str = ""
    factor: float = 1
    left: bool = False
    width: int = 0

    def cell(self, row: Any) -> str:
        value: Any = row[self.value] if isinstance(self.value, str) else self.value(row)
        if value is None:
            return ""
        return format(self.factor * value, self.form) if self.form else str(value)


def markdown(
    columns: Sequence[Column], rows: Iterable[Any], known: Mapping[str, Sequence[str]] | None = None
) -> Iterator[str]:
    """A header, and a line for each row. A list of rows is looked at as a whole for the widths of
    the columns; of others the first, with the cells that are `known` beforehand, by title."""
    widths: list[int] = []
    for row in rows:
        if not widths:
            seen = rows if isinstance(rows, list) else [row]
            widths = [
                _width(column, seen, (known or {}).get(column.title, ())) for column in columns
            ]
            yield _line(columns, [column.title for column in columns], widths)
            rules = ("-" * (width - 1) for width in widths)
            both = zip(columns, rules, strict=True)
            cells = [f":{rule}" if column.left else f"{rule}:" for column, rule in both]
            yield _line(columns, cells, widths)
        yield _line(columns, [column.cell(row) for column in columns], widths)


def filled(columns: Iterable[Column], rows: Sequence[Any]) -> list[Column]:
    """The columns that have something to show in any of the rows."""
    return [column for column in columns if any(map(column.cell, rows))]


def _width(column: Column, rows: Sequence[Any], known: Sequence[str]) -> int:
    return max(column.width, *map(len, (column.title, *known, *map(column.cell, rows))))


def _line(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.ljust(width) if column.left else cell.rjust(width)
        for column, cell, width in zip(columns, cells, widths, strict=True)
    )
    return "| " + " | ".join(padded) + " |"


def csv_lines(rows: Iterable[Row]) -> Iterator[str]:
    """A header and one line a row; lists are written as JSON inside one field, None as nothing."""
    for index, row in enumerate(rows):
        if not index:
            yield _csv_line(list(row))
        yield _csv_line(
            [json.dumps(item) if isinstance(item, list) else item for item in row.values()]
        )


def _csv_line(values: list[Any]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(values)
    return buffer.getvalue()


def json_array(rows: Iterable[Row]) -> Iterator[str]:
    """One array of all rows."""
    yield json.dumps(list(rows), indent=2, ensure_ascii=False)


def json_lines(rows: Iterable[Row]) -> Iterator[str]:
    """One object a line."""
    for row in rows:
        yield json.dumps(row, ensure_ascii=False)


PLAIN: dict[str, Callable[[Iterable[Row]], Iterator[str]]] = {
    "csv": csv_lines,
    "json": json_array,
    "jsonl": json_lines,
}
"""The formats for programs, which have every key."""
