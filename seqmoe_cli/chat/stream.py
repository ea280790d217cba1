"""AnswerView: draws an answer while it comes, with a status line under it.

Rows that cannot change any more are printed for good; only the unfinished row and the status line
are redrawn, so an answer taller than the screen scrolls past once, as plain output would.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from rich.cells import cell_len, chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from seqmoe_cli.chat.status import prefill_line
from seqmoe_cli.terminal.console import printable

_STATUS_STYLE = "dim"


class AnswerView:
    """A context manager; `write` text and set the `status` line inside it. `live` False writes
    the text alone, as it comes. What was written ends with a newline when the view is left."""

    def __init__(self, console: Console, live: bool) -> None:
        self._console = console
        self._row = Text()  # unfinished: its end may still grow, wrap or break
        self._status = ""
        self._mid_line = False  # in the plain way
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._is_live = live

    @property
    def width(self) -> int:
        """Columns to use; the last one stays free, as terminals differ in how they wrap there."""
        return max(8, self._console.width - 1)

    def __enter__(self) -> AnswerView:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the status line away and end what was written; doing so twice is harmless."""
        if self._is_live:
            self._live.stop()
            if self._row:
                self._print(self._row)
        elif self._mid_line:
            self._console.out()
        self._row, self._mid_line = Text(), False

    def status(self, line: str) -> None:
        """Show `line` under the answer."""
        self._status = line
        if self._is_live:
            self._refresh()

    def prefill(self, total: int) -> Callable[[int, int], None]:
        """Shows a prompt of `total` tokens; the callback (done, total), how much is evaluated."""
        started = time.perf_counter()

        def show(done: int, total: int) -> None:
            self.status(prefill_line(done, total, time.perf_counter() - started, self.width))

        show(0, total)
        return show

    def write(self, text: str, style: str = "", status: str | None = None) -> None:
        """Append model text and, if given, change the status line with it. Control characters are
        left out and nothing in the text is markup."""
        self._status = self._status if status is None else status
        text = printable(text)
        if not self._is_live:
            self._console.out(text, style=style or None, highlight=False, end="")
            self._mid_line = not text.endswith("\n") if text else self._mid_line
            return
        self._row.append(text.replace("\t", "    "), style or None)
        finished, self._row = self._wrapped()
        # The live region must hold the new last row before finished rows are printed above it:
        # printing redraws the region as it is.
        self._refresh()
        for row in finished:
            self._print(row)

    def end_paragraph(self) -> None:
        """Leave one empty line before what follows, if something was written."""
        self.write("\n\n" if self._row or self._mid_line else "\n")

    def _wrapped(self) -> tuple[list[Text], Text]:
        """The rows that `_row` fills for good, and the rest."""
        rows: list[Text] = []
        for line in self._row.split("\n", allow_blank=True):
            rows += line.divide(row_breaks(line.plain, self.width))
        return rows[:-1], rows[-1]

    def _refresh(self) -> None:
        status = Text(self._status, style=_STATUS_STYLE, no_wrap=True)
        status.truncate(self.width)
        row = self._row.copy()
        row.no_wrap, row.overflow = True, "crop"
        self._live.update(Group(row, status) if row else status, refresh=True)

    def _print(self, row: Text) -> None:
        row.rstrip()  # blanks at which it was broken
        self._console.print(row, no_wrap=True, overflow="ignore", crop=False)


def row_breaks(line: str, width: int) -> list[int]:
    """Where to break `line` (no newline in it) into rows of `width` columns: before words, inside
    those wider than a row. Appending to the line moves no break but those of its last row; blanks
    at the end of a row may stand out."""
    breaks: list[int] = []
    column = 0
    for match in re.finditer(r"\S+\s*|\s+", line):
        word = match[0].rstrip()
        if column and column + cell_len(word) > width:
            breaks.append(match.start())
            column = 0
        start = match.start()
        for part in chop_cells(word, width)[:-1]:
            start += len(part)
            breaks.append(start)
        column += cell_len(line[start : match.end()])
    return breaks
