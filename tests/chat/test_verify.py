"""A fault in the pool ends the program: two lines, exit code 1, never another word of the model."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from seqmoe_cli.chat.chat import Chat
from seqmoe_cli.chat.session import ChatOptions, Session
from seqmoe_cli.chat.slash import run_command
from seqmoe_cli.chat.template import ChatTemplate
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.errors import PoolError
from seqmoe_cli.settings import EngineOptions, PoolSize
from seqmoe_cli.terminal.console import make_console
from seqmoe_cli.text.sampling import SamplingSettings, Setting
from seqmoe_cli.text.tokenizer import Tokenizer
from tests.chat.screen import Program

FAULT = r"slot \d+ should hold layer \d, expert \d, but holds "
DAMAGED = """
import sys
from seqmoe_weights.store import HostStore
load = HostStore.load
def damaged(model, *rest):
    store = load(model, *rest)
    store.records[:, model.layouts[0]["stamp"].offset] = 77
    return store
HostStore.load = damaged
from seqmoe_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def damaged(*argv: str) -> list[str]:
    """`seqmoe ... --verify` on a machine whose memory does not keep what was read from the disk."""
    return [sys.executable, "-c", DAMAGED, *argv, "--verify", "--device", "cpu"]


@pytest.mark.parametrize("command", ["chat", "perplexity", "bench"])
def test_two_lines_on_stderr(endless: Path, tmp_path: Path, command: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text")
    flags = {
        "chat": ["-p", "hello"],
        "perplexity": ["--file", str(text)],
        "bench": ["-p", "8", "-n", "2", "-r", "1", "-o", "jsonl"],
    }
    argv = damaged(command, str(endless), *flags[command])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stdout == ""
    fault, hint = done.stderr.splitlines()
    assert re.match(f"seqmoe: {FAULT}", fault)
    assert hint.startswith("  ")


def test_the_interactive_chat_ends(endless: Path) -> None:
    program = Program(damaged("chat", str(endless)))
    try:
        program.wait(lambda screen: ">" in screen.display)
        program.send("hello\r")
        assert program.finish() == 1
        shown = "\n".join(program.screen.lines)
        assert re.search(f"^seqmoe: {FAULT}", shown, re.MULTILINE)
        assert "Traceback" not in shown
    finally:
        program.close()


def test_no_command_goes_on_with_a_corrupt_pool(
    endless: Path, template: ChatTemplate, tokenizer: Tokenizer
) -> None:
    options = EngineOptions(PoolSize.parse("all"), "cpu", ctx_size=256, verify=True)
    engine = Engine.open(endless, options)
    session = Session(template, tokenizer, engine.ctx_size)
    out = io.StringIO()
    sampling, behaviour = SamplingSettings({"temp": 0.0}, {}), ChatOptions(Setting(5, "flag"))
    chat = Chat("tiny", make_console(out), engine, session, sampling, behaviour)
    chat.ask("hello")
    assert len(session.exchanges) == 1
    said = out.getvalue()
    engine.pool.slots[:, engine.model.layouts[0]["stamp"].offset] += 1
    with pytest.raises(PoolError, match=FAULT):
        run_command(chat, "/regen")
    with pytest.raises(PoolError, match=FAULT):
        chat.ask("and now?")
    assert out.getvalue() == said
    engine.close()
