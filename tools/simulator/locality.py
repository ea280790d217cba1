"""How much of its routing a model uses again soon: figures of a trace, without a pool.

T tokens, L layers, K experts per token, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from seqmoe_cli.forecast.trace import Trace


def adjacent_overlap(trace: Trace) -> NDArray[np.float64]:
    """[L]: the share of a token's experts that the token before it used too, over all pairs of
    neighbours in a sequence; NaN without any. Chance alone gives K / E."""
    neighbours = np.flatnonzero(trace.sequence[1:] == trace.sequence[:-1])
    shared = np.zeros(trace.num_layers)
    for layer in range(trace.num_layers):
        experts = trace.experts[:, layer]
        before, after = experts[neighbours], experts[neighbours + 1]
        shared[layer] = (before[:, :, None] == after[:, None, :]).sum()
    with np.errstate(invalid="ignore"):
        return np.asarray(shared / (len(neighbours) * trace.top_k))


def working_set(trace: Trace, window: int) -> float:
    """Mean number of different experts that `window` tokens in a row use in a layer, over windows
    side by side in each sequence; NaN if none is that long."""
    sizes = [_used(trace, start, window) for start in _windows(trace.sequence, window)]
    return float(np.mean(sizes)) if sizes else float("nan")


def _windows(sequence: NDArray[np.uint32], window: int) -> Iterator[int]:
    """First tokens of the windows that lie in one sequence."""
    inner = np.flatnonzero(sequence[1:] != sequence[:-1]) + 1
    for part in np.split(np.arange(len(sequence)), inner):
        yield from part[: len(part) // window * window : window].tolist()


def _used(trace: Trace, start: int, window: int) -> float:
    """Different experts of a window, mean over layers."""
    used = np.zeros((trace.num_layers, trace.num_experts), bool)
    layers = np.arange(trace.num_layers)[None, :, None]
    used[layers, trace.experts[start : start + window]] = True
    return float(used.sum(axis=1).mean())
