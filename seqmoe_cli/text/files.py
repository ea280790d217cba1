"""Text and JSON in files: what a user names, what a checkpoint brings along, what is shipped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from seqmoe_cli.errors import CheckpointError, PromptError

STDIN = "-"
SHIPPED = "aesop_fables.txt"
COPY_HINT = "copy it again from the original checkpoint"


def read_text(label: str, file: str) -> str:
    """A UTF-8 file, or standard input for `-`, byte for byte; `label` is the flag in messages.

    Raises `PromptError` when it cannot be read.
    """
    name = label if file == STDIN and not label.startswith("-") else f"{label} {file}"
    try:
        if file != STDIN:
            data = Path(file).read_bytes()
        else:
            data = sys.stdin.buffer.read() if sys.stdin is not None else b""
    except OSError as error:
        raise PromptError(f"{name} cannot be read: {error.strerror}", "check the path") from error
    except ValueError as error:  # a NUL in the name
        raise PromptError(f"{name!r} cannot be read: {error}", "check the path") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name} is not UTF-8 text: byte {data[error.start]:#04x} at offset {error.start}",
            "convert it to UTF-8",
        ) from error


def check_text(label: str, text: str, hint: str = "set a UTF-8 locale") -> str:
    """`text` of the command line or of JSON; raises `PromptError` when UTF-8 cannot hold it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"{label} is not UTF-8 text", hint) from error
    return text


def parse_json(label: str, text: str, hint: str) -> object:
    """The value in `text`; raises `PromptError` that starts with `label` if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{label} is not JSON: {error}", hint) from error


def read_checkpoint_file(path: Path, parse: Callable[[str], Any] = str) -> Any:
    """What `parse` makes of a checkpoint's text file; raises `CheckpointError` naming the file."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", COPY_HINT) from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint, empty when the file is absent.

    Raises `CheckpointError` naming the file when it holds anything else.
    """
    if not path.is_file():
        return {}
    value = read_checkpoint_file(path, json.loads)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object", COPY_HINT)
    return value


def shipped_text() -> tuple[str, str]:
    """The fables shipped with the package, connected English prose of about 24,000 tokens, and the
    name under which rows cite them."""
    text = files("seqmoe_cli").joinpath("data", SHIPPED).read_bytes().decode("utf-8")
    return text, f"seqmoe_cli/data/{SHIPPED}"
