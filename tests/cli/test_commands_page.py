"""docs/commands.md shows the help texts that the program prints, those of all commands."""

from __future__ import annotations

import pytest

from tools.commands_page import PAGE, fill


def test_help_texts_are_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # restored afterwards
    text = PAGE.read_text(encoding="utf-8")
    assert fill(text) == text, "renew them: python -m tools.commands_page"


COMMANDS = [
    "chat",
    "bench",
    "convert",
    "info",
    "doctor",
    "perplexity",
    "trace",
    "train",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_shown(command: str) -> None:
    assert f"```\n$ seqmoe {command} --help\nUsage: seqmoe {command} " in PAGE.read_text()
