"""The errors of the command line: those of the weights package and the ones that it adds."""

from __future__ import annotations

from seqmoe_weights.errors import CheckpointError as CheckpointError
from seqmoe_weights.errors import PackedModelError as PackedModelError
from seqmoe_weights.errors import ResourceError as ResourceError
from seqmoe_weights.errors import SeqmoeError as SeqmoeError
from seqmoe_weights.errors import UnsupportedError as UnsupportedError
from seqmoe_weights.errors import either as either


class UsageError(SeqmoeError):
    """A command line that cannot be accepted, whatever files, models and machine are like; exit
    code 2."""


class PoolError(SeqmoeError):
    """A slot does not hold the expert that the lookup table says. The engine is of no more use."""


class PromptError(SeqmoeError):
    """A prompt or conversation that cannot be answered: unreadable, empty, too long, or no chat
    template."""
