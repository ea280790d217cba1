"""The text that a benchmark reads: the fables shipped with the package, or a file of the user."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from seqmoe_cli.errors import PromptError

SHIPPED = "aesop_fables.txt"


def shipped_text() -> tuple[str, str]:
    """Connected English prose of about 24,000 tokens, and the name under which rows cite it."""
    text = files("seqmoe_cli").joinpath("data", SHIPPED).read_bytes().decode("utf-8")
    return text, f"seqmoe_cli/data/{SHIPPED}"


def read_text(path: Path) -> str:
    """The file byte for byte as UTF-8: no newline is translated, no byte order mark removed.

    Raises `PromptError` naming the file when it cannot be read or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{path} is not UTF-8: byte {error.start} cannot be decoded",
            "convert it first, for example with iconv -t UTF-8",
        ) from error
    except OSError as error:
        raise PromptError(
            f"cannot read {path}: {error.strerror}", "give the path of a text file"
        ) from error
