"""Errors that a user can cause. Imports nothing, so the command line can catch them cheaply."""

from __future__ import annotations


def either(words: tuple[str, ...]) -> str:
    """One or more choices as people list them: a, b or c."""
    *rest, last = words
    return f"{', '.join(rest)} or {last}" if rest else last


class SeqmoeError(Exception):
    """A failure that the user can understand and mend; shown as one or two lines, exit code 1.

    `message` says what is wrong and where (file, tensor, field, flag); `hint` says what to do.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CheckpointError(SeqmoeError):
    """The source checkpoint cannot be read as it is: missing, malformed or contradicting itself."""


class UnsupportedError(SeqmoeError):
    """The checkpoint is well-formed but asks for something that is not implemented."""


class PackedModelError(SeqmoeError):
    """A packed model is missing, unfinished, damaged or of another format version."""


class ResourceError(SeqmoeError):
    """Not enough disk, RAM, VRAM or pinnable memory; the message holds the numbers."""
