"""A terminal emulator for tests: what a person would see, with everything that scrolled away."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence

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

    def on_reply(self, send: Callable[[str], None]) -> None:
        """Where the terminal's answers to questions go, such as where the cursor is."""
        self._screen.write_process_input = send

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


class Program:
    """A program in a pseudo-terminal of 80 x 24, whose `Screen` shows stdout and stderr."""

    def __init__(self, argv: Sequence[str], **env: str) -> None:
        self.screen = Screen()
        self.output = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.screen.on_reply(lambda text: self.send(text))
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"} | env,
            preexec_fn=_own_terminal,
        )
        os.close(slave)

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read(self, timeout: float) -> bool:
        """Show what came within `timeout` seconds; False when nothing did or the program ended."""
        if not select.select([self._master], [], [], timeout)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self.output += data
        self.screen.feed(data)
        return bool(data)

    def wait(self, shows: Callable[[Screen], object], timeout: float = 60) -> None:
        """Read until the screen is as wanted; a failure shows what it was instead."""
        deadline = time.monotonic() + timeout
        while not shows(self.screen):
            if time.monotonic() > deadline or self.process.poll() is not None:
                while self.read(0.2):
                    pass
                assert shows(self.screen), "\n".join(self.screen.lines)
            self.read(0.1)

    def finish(self, timeout: float = 30) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read(0.1)
        while self.read(0.1):
            pass
        os.close(self._master)
        return self.process.wait(timeout=1)

    def close(self) -> None:
        """Whatever happened, leave no process behind."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
