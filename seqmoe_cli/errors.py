"""The errors of the command line: those of the weights package and the ones that it adds."""

from __future__ import annotations

from seqmoe_weights.errors import (
    CheckpointError,
    PackedModelError,
    ResourceError,
    SeqmoeError,
    UnsupportedError,
    either,
)

__all__ = [
    "CheckpointError",
    "PackedModelError",
    "PoolError",
    "PromptError",
    "ResourceError",
    "SeqmoeError",
    "UnsupportedError",
    "UsageError",
    "either",
]


class UsageError(SeqmoeError):
    """A command line that cannot be accepted, whatever files, models and machine are like; exit
    code 2."""


class PoolError(SeqmoeError):
    """A slot does not hold the expert that the lookup table says. The engine is of no more use."""


class PromptError(SeqmoeError):
    """A prompt or conversation that cannot be answered: unreadable, empty, too long, or no chat
    template."""
