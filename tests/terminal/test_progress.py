"""The status line on stderr: for a terminal only, and gone at the end."""

from __future__ import annotations

import io
import sys

import pytest

from seqmoe_cli.terminal.progress import status_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, term: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "20")
    with pytest.raises(KeyboardInterrupt), status_line() as tell:
        tell("run 1 of 5, and then some more")
        raise KeyboardInterrupt
    return stream.getvalue()


def test_a_terminal_sees_one_line_that_fits_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Terminal(), "xterm", monkeypatch)
    assert text == "\r\x1b[2Krun 1 of 5, and the\r\x1b[2K"


@pytest.mark.parametrize(("stream", "term"), [(io.StringIO, "xterm"), (Terminal, "dumb")])
def test_others_see_nothing(
    stream: type[io.StringIO], term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(stream(), term, monkeypatch) == ""
