"""Job sequencing with deadlines: never worse than trying every choice, and always in time."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from tools.simulator.schedule import schedule

jobs = st.lists(st.tuples(st.integers(1, 9), st.integers(-1, 5)), max_size=7)


def most_profit(jobs: list[tuple[int, int]], most: int) -> int:
    """By trying every choice, each in the order of its deadlines."""
    return max(
        sum(profit for profit, _ in chosen)
        for num in range(min(most, len(jobs)) + 1)
        for chosen in combinations(sorted(jobs, key=lambda job: job[1]), num)
        if all(deadline > unit for unit, (_, deadline) in enumerate(chosen))
    )


@settings(deadline=None, max_examples=200)
@given(jobs, st.integers(0, 7))
def test_best_choice_in_time(jobs: list[tuple[int, int]], most: int) -> None:
    profit, deadline = [job[0] for job in jobs], [job[1] for job in jobs]
    chosen = schedule(profit, deadline, most)
    assert len(set(chosen)) == len(chosen) <= most
    assert all(deadline[job] > unit for unit, job in enumerate(chosen))
    assert sum(profit[job] for job in chosen) == most_profit(jobs, most)


def test_by_hand() -> None:
    """The two that pay best get the units 2 and 1 before deadline 2, the third finds none left; the
    one with time on its hands comes last."""
    assert schedule([5, 9, 7, 1], [2, 2, 2, 9], 9) == [2, 1, 3]
    assert schedule([5, 9, 7, 1], [2, 2, 2, 9], 1) == [1]
    assert schedule([5, 5], [1, 1], 9) == [0]  # equal ones: the first
    assert schedule([], [], 9) == []
