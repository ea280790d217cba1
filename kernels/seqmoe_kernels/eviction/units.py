"""Units of scores and forecasts, for the kernels and for the policies that decide like them."""

from __future__ import annotations

NEVER = (1 << 63) - 1  # the score of a slot that must not become a victim
ONE = 1 << 24  # probabilities, rates and expected uses are in units of 1/ONE
GAP_SHIFT = 8  # tables of logarithms have 1 << GAP_SHIFT entries for a doubling
WINDOWS = ((1, 1), (2, 2), (3, 4), (5, 8))
"""Steps ahead that a forecast tells apart, first and last; 1 is the step that begins."""
NUM_WINDOWS = len(WINDOWS)
