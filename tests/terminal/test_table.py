"""Tables of columns that are declared once."""

from __future__ import annotations

from seqmoe_cli.terminal.table import Column, filled, markdown

COLUMNS = [
    Column("name", "name", left=True),
    Column("share %", "share", ".1f", 100),
    Column("twice", lambda row: 2 * row["number"], ","),
    Column("empty", "nothing"),
]
ROWS = [
    {"name": "a", "share": 0.5, "number": 600, "nothing": None},
    {"name": "longer", "share": None, "number": 0, "nothing": None},
]


def test_a_list_is_looked_at_as_a_whole() -> None:
    assert list(markdown(filled(COLUMNS, ROWS), ROWS)) == [
        "| name   | share % | twice |",
        "| :----- | ------: | ----: |",
        "| a      |    50.0 | 1,200 |",
        "| longer |         |     0 |",
    ]


def test_of_rows_that_come_one_by_one_the_first_stands_for_all() -> None:
    lines = list(markdown(COLUMNS[:1], iter(ROWS), {"name": ["abcdefg"]}))
    assert lines[1:] == ["| :------ |", "| a       |", "| longer  |"]
    assert list(markdown(COLUMNS[:1], iter(ROWS)))[2:] == ["| a    |", "| longer |"]
