"""The formats for programs: each turns a stream of rows, of any command, into a stream of lines.
Imports no torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from typing import Protocol


class Record(Protocol):
    """A row as one flat object, with the same keys in every row of a command."""

    def to_dict(self) -> dict[str, object]: ...


def csv_lines(rows: Iterable[Record]) -> Iterator[str]:
    """A header and one line a row; lists are written as JSON inside one field, None as nothing."""
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


def json_array(rows: Iterable[Record]) -> Iterator[str]:
    """One array of all rows."""
    yield json.dumps([row.to_dict() for row in rows], indent=2, ensure_ascii=False)


def json_lines(rows: Iterable[Record]) -> Iterator[str]:
    """One object a line."""
    for row in rows:
        yield json.dumps(row.to_dict(), ensure_ascii=False)
