"""The interactive chat as a person uses it: a real process in a pseudo-terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chat.screen import Program, Screen

CTRL_C, CTRL_D, CTRL_J, ENTER, UP = "\x03", "\x04", "\n", "\r", "\x1b[A"


class Repl(Program):
    """A chat with an endless model, at its first prompt."""

    def __init__(self, model: Path, *flags: str, **env: str) -> None:
        argv = [sys.executable, "-m", "seqmoe_cli", "chat", str(model), "--temp", "0", *flags]
        super().__init__(argv, **env)
        self.wait(_at_prompt)

    def say(self, text: str, expect: str) -> None:
        """Send a line and wait until the prompt is back below a row that matches."""
        self.send(text + ENTER)
        self.wait(lambda screen: _at_prompt(screen) and re.search(expect, _since(screen, text)))


def _at_prompt(screen: Screen) -> bool:
    rows = [line for line in screen.display if line and not line.startswith("ctx ")]
    return bool(rows) and rows[-1] == ">"


def _since(screen: Screen, text: str) -> str:
    """What is shown below the last row that holds `text`."""
    return "\n".join(screen.lines).rpartition(text)[2]


@pytest.fixture
def start() -> Iterator[list[Repl]]:
    programs: list[Repl] = []
    yield programs
    for program in programs:
        program.close()


def test_a_session(endless: Path, seqmoe_home: Path, start: list[Repl]) -> None:
    repl = Repl(endless, "-c", "20000", "-n", "20")
    start.append(repl)
    assert repl.screen.lines[0].startswith("endless on ")
    repl.say("/undo", "nothing to undo")
    repl.say("/hlep", "did you mean /help?")
    repl.say("hello", r"\[stopped at -n 20\]\n20 tokens, .*\(cold pool\)")
    repl.wait(lambda screen: re.match(r"ctx 3\d/20,000 \| pool ", screen.display[-1]))

    # Ctrl-C stops the answer alone, however often it is pressed; what is typed at once is kept.
    repl.say("/set n none", "predict none")
    repl.send("talk" + ENTER)
    repl.wait(lambda screen: any("tok/s | hit" in line for line in screen.display))
    repl.send(CTRL_C * 10 + "/show" + ENTER)
    repl.wait(lambda screen: "[stopped]" in _since(screen, "> talk"))
    repl.wait(lambda screen: re.search(r"predict +none +/set", "\n".join(screen.display)))
    repl.wait(_at_prompt)

    # Ctrl-C at the prompt: clears what is typed, else says how to leave.
    repl.send("half a line")
    repl.wait(lambda screen: "> half a line" in screen.display)
    repl.send(CTRL_C)
    repl.wait(lambda screen: "> half a line" not in screen.display and _at_prompt(screen))
    repl.send(CTRL_C * 10)
    repl.wait(lambda screen: screen.display.count("Ctrl-D or /exit leaves") >= 5)
    repl.wait(_at_prompt)

    # A paste of many lines, with a line typed below it, is one message.
    repl.say("/set n 4", "predict 4")
    pasted = "\n".join(f"line {n}" for n in range(5))
    repl.send(f"\x1b[200~{pasted}\x1b[201~")
    repl.send(CTRL_J + "typed")
    repl.wait(lambda screen: "  typed" in screen.display)
    repl.send(ENTER)
    repl.wait(lambda screen: "[stopped at -n 4]" in _since(screen, "  typed"))
    repl.wait(_at_prompt)
    repl.say("/undo", "took back: line 0\n")
    repl.say('"""' + ENTER + "in a block" + ENTER + '"""', r"\[stopped at -n 4\]")
    repl.say("/undo", "took back: in a block\n")

    repl.send(CTRL_D)
    assert repl.finish() == 0
    assert "Traceback" not in "\n".join(repl.screen.lines)
    history = seqmoe_home / "history"
    assert history.stat().st_mode & 0o777 == 0o600

    # The next session remembers the lines; /exit leaves as well.
    again = Repl(endless, "--no-stats")
    start.append(again)
    again.send(UP * 2)
    again.wait(lambda screen: "  in a block" in screen.display)
    again.send(CTRL_C)
    again.wait(_at_prompt)
    again.send("/exit" + ENTER)
    assert again.finish() == 0


def test_a_dumb_terminal(endless: Path, seqmoe_home: Path, start: list[Repl]) -> None:
    repl = Repl(endless, "-n", "20", TERM="dumb", SEQMOE_NOHISTORY="1")
    start.append(repl)
    repl.say("hello", r"\[stopped at -n 20\]\n20 tokens")
    repl.send(CTRL_D)
    assert repl.finish() == 0
    assert b"\x1b" not in repl.output
    assert not (seqmoe_home / "history").exists()
