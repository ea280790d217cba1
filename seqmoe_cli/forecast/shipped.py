"""Opening a trace by name: the shipped one, or a file in any of the formats that are known."""

from __future__ import annotations

import lzma
from importlib.resources import as_file, files
from pathlib import Path

from seqmoe_cli.forecast.importers import read_delta_npy, read_route_csv, unpacked
from seqmoe_cli.forecast.trace import Trace, TraceError

SHIPPED = ("qwen3",)
"""Names of traces in `seqmoe_cli/data`; the note beside each gives its origin and licence."""
_ZIP_MAGIC, _NUMPY_MAGIC = b"PK", b"\x93NUMPY"


def open_trace(source: str | Path) -> Trace:
    """A shipped trace by its name, or a file: one of `seqmoe trace`, a routing table in CSV, or a
    delta-coded array of numpy; the last two may be compressed with xz. The content decides, not the
    name; a file called like a shipped trace is opened as `./qwen3`.

    Raises `TraceError` for a file that is not there or holds no trace.
    """
    if source in SHIPPED:
        with as_file(files("seqmoe_cli").joinpath("data", f"{source}.trace")) as path:
            return Trace.load(path)
    path = Path(source)
    if not str(source) or not path.exists():
        raise TraceError(
            f"there is no trace {str(source)!r}",
            f"give a file, or a trace that comes with seqmoe: {', '.join(SHIPPED)}",
        )
    try:
        with unpacked(path) as file:
            start = file.read(len(_NUMPY_MAGIC))
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise TraceError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            "give a file of seqmoe trace, a routing table in CSV, or an array of numpy",
        ) from error
    if start.startswith(_ZIP_MAGIC):
        return Trace.load(path)
    return read_delta_npy(path) if start == _NUMPY_MAGIC else read_route_csv(path)
