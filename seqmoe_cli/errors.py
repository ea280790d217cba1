"""The errors of the command line: those of the weights package and the ones that it adds."""

from __future__ import annotations

from seqmoe_weights.errors import (
    CheckpointError,
    PackedModelError,
    ResourceError,
    SeqmoeError,
    UnsupportedError,
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
]


class UsageError(SeqmoeError):
    """A flag or argument that cannot be accepted; exit code 2."""


class PoolError(SeqmoeError):
    """A slot does not hold the expert that the lookup table says. The engine is of no more use."""


class PromptError(SeqmoeError):
    """A prompt or conversation that cannot be answered: empty, too long, or no chat template."""
