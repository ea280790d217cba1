"""Who leaves the pool: a policy gives every use of an expert a score, the smallest is the victim.

N events of K experts each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Policy = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Flat expert ids [N, K] -> the score [N, K] that each has from its event on to its next one."""


def lru(events: NDArray[np.int64]) -> NDArray[np.int64]:
    """The expert leaves whose last use is longest ago, as in the engine."""
    return np.broadcast_to(np.arange(len(events))[:, None], events.shape)


def belady(events: NDArray[np.int64]) -> NDArray[np.int64]:
    """The expert leaves whose next use is furthest away. It needs to know the future: no policy
    that loads on demand needs fewer loads."""
    num_events, top_k = events.shape
    flat = events.ravel()
    order = np.argsort(flat, kind="stable")  # the uses of an expert one after the other, in time
    again = flat[order[1:]] == flat[order[:-1]]
    next_use = np.full(flat.shape, num_events)
    next_use[order[:-1][again]] = order[1:][again] // top_k
    return -next_use.reshape(events.shape)
