"""Predictions: what a trained predictor expects at every step of a recorded trace."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from seqmoe_cli.errors import SeqmoeError
from seqmoe_cli.forecast.corpus import Corpus, check_fits
from seqmoe_cli.forecast.predictor import Predictor, expected_uses
from seqmoe_cli.forecast.trace import Trace

_BLOCK = 64  # steps evaluated at once


class Predictions:
    """The predictor reads each sequence from its first token on, with a fresh state.

    Raises `SeqmoeError`, as `check_trace` does, for a trace that does not fit the predictor.
    """

    def __init__(self, predictor: Predictor, trace: Trace) -> None:
        check_trace(predictor, trace)
        self._predictor = predictor.eval()
        self._corpus = Corpus(trace, predictor.base.device)

    def blocks(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """(number of the first token, uses expected from each on: f32 [n, W, N]), in order."""
        corpus = self._corpus
        for start, end in zip(corpus.starts.tolist(), corpus.ends.tolist(), strict=True):
            state = self._predictor.start(1)
            for first in range(start, end, _BLOCK):
                index = torch.arange(first, min(first + _BLOCK, end), device=corpus.first.device)
                with torch.no_grad():
                    logits, state = self._predictor(corpus.inputs(index[None]), state)
                yield first, expected_uses(logits[0]).cpu().numpy()


def check_trace(predictor: Predictor, trace: Trace) -> None:
    """Raise `SeqmoeError` for a trace of another shape, or one without the token ids that the
    predictor was trained with."""
    shape = predictor.shape
    sizes = (shape.num_layers, shape.num_experts, shape.top_k)
    check_fits(trace, sizes, shape.vocab_size, "the predictor is for")
    if shape.vocab_size and trace.token_ids is None:
        raise SeqmoeError(
            f"the trace of {trace.model} has no token ids",
            "record the trace with the model that the predictor is for",
        )
