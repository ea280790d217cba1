"""One line on stderr that says what is going on, for people at a terminal only."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from seqmoe_cli.terminal.console import is_terminal, printable


class StatusLine:
    """Call it with a text to show; `clear` makes room for lines on stdout."""

    def __init__(self) -> None:
        self._shown = is_terminal(sys.stderr)

    def __call__(self, text: str) -> None:
        if self._shown:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[2K{printable(text)[:width]}")
            sys.stderr.flush()

    def clear(self) -> None:
        self("")


@contextmanager
def status_line() -> Iterator[StatusLine]:
    """A status line that is gone at the end, whatever happens."""
    line = StatusLine()
    try:
        yield line
    finally:
        line.clear()
