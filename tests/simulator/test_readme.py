"""tools/simulator/README.md shows the help text that the simulator prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.simulator.__main__ import main

README = Path(__file__).parents[2] / "tools" / "simulator" / "README.md"


def test_the_help_text_is_the_programs_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Usage: python -m tools.simulator [OPTIONS] {TRACE}...")
    block = f"```\n$ python -m tools.simulator --help\n{text}```\n"
    assert block in README.read_text(), "renew it: COLUMNS=80 python -m tools.simulator --help"
