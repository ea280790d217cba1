"""A terminal emulator for tests: what a person would see, with everything that scrolled away."""

from __future__ import annotations

import io
from collections.abc import Callable

import pyte
from rich.console import Console


class Screen:
    """Feed it bytes of a terminal; `lines` are all rows ever shown, `display` those on screen."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self._screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=0.5)
        self._stream = pyte.ByteStream(self._screen)
        self.columns = columns

    def feed(self, data: bytes) -> None:
        self._stream.feed(data)

    @property
    def display(self) -> list[str]:
        return [row.rstrip() for row in self._screen.display]

    @property
    def lines(self) -> list[str]:
        """Scrolled rows, then the screen, without the empty rows at its end."""
        top = [
            "".join(row[x].data for x in range(self.columns)).rstrip()
            for row in self._screen.history.top
        ]
        return "\n".join(top + self.display).rstrip().split("\n")


class TerminalFile(io.StringIO):
    """A text file that says it is a terminal and shows what is written to it on a `Screen`."""

    def __init__(self, screen: Screen, on_write: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.screen = screen
        self._on_write = on_write

    def write(self, text: str) -> int:
        self.screen.feed(text.replace("\n", "\r\n").encode())  # as a terminal driver does
        self._on_write()
        return len(text)

    def isatty(self) -> bool:
        return True


def terminal_console(
    screen: Screen, on_write: Callable[[], None] = lambda: None, rows: int = 24
) -> Console:
    """A rich console on a `Screen`."""
    return Console(
        file=TerminalFile(screen, on_write),
        force_terminal=True,
        width=screen.columns,
        height=rows,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
