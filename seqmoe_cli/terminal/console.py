"""What a stream can show: whether it is a terminal, its rich console, text made safe for it."""

from __future__ import annotations

import os
import re
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Everything that could move the cursor or start an escape sequence; newline and tab stay.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def is_terminal(stream: IO[str] | None) -> bool:
    """True when `stream` is a terminal that understands escape codes (TERM=dumb does not)."""
    if stream is None or not stream.isatty():
        return False
    return os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def make_console(stream: IO[str]) -> Console:
    """A rich console that writes escape codes to a real terminal only, whatever FORCE_COLOR says.

    It adds nothing to the text by itself: no markup, emoji codes or highlighting.
    """
    from rich.console import Console

    return Console(
        file=stream,
        force_terminal=is_terminal(stream),
        markup=False,
        emoji=False,
        highlight=False,
    )


def printable(text: str) -> str:
    """`text` without control characters, so that a model cannot drive the user's terminal."""
    return _CONTROLS.sub("", text)
