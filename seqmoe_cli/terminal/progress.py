"""What is going on, on stderr and for people at a terminal only: one line of text, or bars."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from seqmoe_cli.terminal.console import is_terminal, make_console, printable
from seqmoe_weights.files import readable_size


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


class Report(Protocol):
    """How far a stage is: `done` of `total`, in bytes if there is no `text` that says more."""

    def __call__(self, stage: str, done: float, total: float, text: str = ...) -> None: ...


@contextmanager
def progress_bars() -> Iterator[Report]:
    """Draws one bar for each stage that is reported; nothing if stderr is no terminal, so that logs
    stay clean."""
    if not is_terminal(sys.stderr):
        yield lambda stage, done, total, text="": None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
        console=make_console(sys.stderr),
        transient=True,
        redirect_stdout=False,  # or a print to stdout would come out on stderr
    ) as bars:
        tasks = {}

        def report(stage: str, done: float, total: float, text: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, text="")
            text = text or f"{readable_size(int(done))} of {readable_size(int(total))}"
            bars.update(tasks[stage], completed=done, total=total, text=text)

        yield report


def note(*lines: str) -> None:
    """Lines on stderr, if that is a terminal."""
    if is_terminal(sys.stderr):
        for line in lines:
            print(line, file=sys.stderr)
