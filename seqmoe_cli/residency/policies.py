"""Which expert is evicted: the numbers by which the kernels and the simulator decide alike.

One rule holds for all policies: the victim is the slot of the expert with the smallest score, and
of equal scores the lowest slot. Every score is an int64 made by integer arithmetic alone, with the
roundings given here. A score belongs to an expert, not to a slot: it survives eviction.

`lru`: the number of the event of the last use, from 1 on; 0 for an expert that was never used.

`decayed`: log2(sum over past uses of 2^(t / half_life)), t being the token of the use. All counts
decay by the same factor, so theirs is the order of these sums at any time, and nothing has to be
computed again as time goes by. In units of 1/DOUBLING; 0 for an expert never used:

    now   = CLOCK_START + token * tick
    score = max(score, now) + LOG2_1P[|score - now| >> 8]    (its last entry behind its end)

`forecast`: see `seqmoe_kernels.eviction.expected_use`. W windows of a forecast.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seqmoe_kernels.eviction.units import GAP_SHIFT as GAP_SHIFT
from seqmoe_kernels.eviction.units import NEVER as NEVER
from seqmoe_kernels.eviction.units import ONE as ONE
from seqmoe_kernels.eviction.units import WINDOWS as WINDOWS

Ints = NDArray[np.int64]

HALF_LIFE = 16.0  # tokens in which a past use comes to count half as much
DISCOUNT = 2.0  # tokens ahead at which an expected use counts half as much

DOUBLING = 1 << 16  # score units in which a decayed count doubles
CLOCK_START = 1 << 26  # 1024 doublings: so far above 0 that "never used" counts as nothing
LOG2_1P = np.round(
    DOUBLING * np.log2(1 + np.exp2(-(np.arange(18 << GAP_SHIFT) + 0.5) / (1 << GAP_SHIFT)))
).astype(np.int64)
"""log2(1 + 2^-gap) in score units, for a gap in steps of 1/256 doubling; its last entry is 0."""


def ticks(half_life: float = HALF_LIFE) -> int:
    """How far `now` goes on with each token, in score units."""
    return max(round(DOUBLING / half_life), 1)


WIDTHS = np.array([last - first + 1 for first, last in WINDOWS])
EXP2 = np.round(ONE * np.exp2((np.arange(256) + 0.5) / 256)).astype(np.int64)
"""2^x for x in [0, 1) in steps of 1/256, in units of 1/ONE."""


def discounted(discount: float = DISCOUNT) -> tuple[Ints, int]:
    """The weight of an expected use in each window, and the weight of the rate of decayed counts,
    which stands for all steps behind the last window; in units of 2^-16.

    A use n steps ahead weighs d^(n - 1), d = 2^(-1 / discount). A window weighs the mean of its
    steps. The steps behind the last one add up to d^8 / (1 - d)."""
    d = 2 ** (-1 / discount)
    weights = [np.mean([d ** (n - 1) for n in range(a, b + 1)]) for a, b in WINDOWS]
    tail = round((1 << 16) * d ** WINDOWS[-1][1] / (1 - d))
    return np.round(np.array(weights) * (1 << 16)).astype(np.int64), tail


def uses_per_count(half_life: float = HALF_LIFE) -> int:
    """Uses per step that a decayed count of 1 stands for, in units of 1/ONE."""
    return round(ONE * (1 - 2 ** (-1 / half_life)))
