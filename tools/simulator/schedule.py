"""Which prefetches are worth starting: job sequencing with deadlines. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def schedule(
    profit: Sequence[int] | NDArray[np.int64],
    deadline: Sequence[int] | NDArray[np.int64],
    most: int,
) -> list[int]:
    """Choose among jobs that take the link for one unit of time each, one after the other.

    `profit` [n] is what a job is worth if it ends in time, whole numbers above 0. `deadline` [n] is
    how many units fit before it is needed: a job with deadline d must be one of the first d; with
    0 or less it cannot be in time and is left out. `most` jobs are chosen at the most (the budget).

    The textbook greedy, which is optimal for unit jobs: the most profitable first (of equal ones
    the first), each in the latest free unit before its deadline; without a free one it is left out.
    Returns the indices of the chosen jobs in the order in which to start them, without gaps: moved
    up, they only end earlier.
    """
    deadlines = np.asarray(deadline, np.int64)
    order = np.argsort(-np.asarray(profit, np.int64), kind="stable")
    free = list(range(len(order) + 1))  # unit -> the latest free unit up to it; 0: none
    chosen: dict[int, int] = {}
    for job in order.tolist():
        if len(chosen) >= most:
            break
        unit = _latest_free(free, min(int(deadlines[job]), len(order)))
        if unit > 0:
            chosen[unit] = job
            free[unit] = unit - 1
    return [chosen[unit] for unit in sorted(chosen)]


def _latest_free(free: list[int], unit: int) -> int:
    """Follow the links to the latest free unit, and shorten the way for the next one."""
    unit = root = max(unit, 0)
    while free[root] != root:
        root = free[root]
    while free[unit] != root:
        free[unit], unit = root, free[unit]
    return root
