"""Opening a trace by name: the shipped one, or a file."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from seqmoe_cli.forecast.trace import Trace, TraceError

SHIPPED = ("qwen3",)
"""Names of traces in `seqmoe_cli/data`; the note beside each gives its origin and licence."""


def open_trace(source: str | Path) -> Trace:
    """A shipped trace by its name, or a file of `seqmoe trace`; a file called like a shipped trace
    is opened as `./qwen3`. Raises `TraceError` for a file that is not there or holds no trace."""
    if source in SHIPPED:
        with as_file(files("seqmoe_cli").joinpath("data", f"{source}.trace")) as path:
            return Trace.load(path)
    if not str(source) or not Path(source).exists():
        raise TraceError(
            f"there is no trace {str(source)!r}",
            f"give a file, or a trace that comes with seqmoe: {', '.join(SHIPPED)}",
        )
    return Trace.load(Path(source))
