"""Puts the program's own help texts into docs/commands.md: `python -m tools.commands_page`.

A block that starts with `$ seqmoe ... --help` gets what that command prints, at 80 columns.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

from seqmoe_cli.main import main

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
_BLOCK = re.compile(r"^```\n\$ (seqmoe [^\n]*--help)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fill(page: str) -> str:
    """`page` with every help block renewed."""
    return _BLOCK.sub(lambda block: f"```\n$ {block[1]}\n{help_text(block[1])}```", page)


def help_text(command: str) -> str:
    """What `command` prints on a terminal of 80 columns."""
    os.environ["COLUMNS"] = "80"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(shlex.split(command)[1:])
    return printed.getvalue()


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
