"""The link: times by hand, for round numbers, and what holds whatever happens on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.simulator.link import PREFETCH_BY, Copy, Link, LinkClock, ThreadClock, clock_of

# A copy takes 10 s, a fetch 20 s; while they share the link, both run at half their speed.
THREAD = Link(
    record_bytes=100,
    layer_s=5.0,
    fetch_bytes_per_s=5.0,
    launch_s=1.0,
    prefetch_by="thread",
    delay_s=3.0,
    dma_bytes_per_s=10.0,
    fetch_share=0.5,
)
GPU = replace(THREAD, prefetch_by="gpu")  # both take 20 s


def with_copies(*start_s: float, link: Link = THREAD) -> LinkClock:
    """The copies are for the events 0, 1, ..."""
    clock = clock_of(link)
    clock.copies += [Copy(n, n, due=n, start_s=start) for n, start in enumerate(start_s)]
    return clock


def test_copies_run_one_after_the_other() -> None:
    clock = with_copies(3, 4, 40)
    assert isinstance(clock, ThreadClock)
    assert [clock.lands_at(copy) for copy in clock.copies] == [13, 23, 50]
    clock.run(14)
    assert [copy.expert for copy in clock.landed] == [0]
    assert clock.copies[0].left == pytest.approx(0.9)
    assert clock.ready_s() == pytest.approx(9 + 10)
    clock.run(30)
    assert [copy.expert for copy in clock.landed] == [0, 1]
    assert clock.copies[0].left == 1 and clock.now == 30
    clock.run(60)
    assert not clock.copies and clock.ready_s() == 3


@pytest.mark.parametrize("link", [GPU, THREAD])
def test_a_fetch_alone(link: Link) -> None:
    clock = with_copies(link=link)
    clock.fetch(2)
    assert clock.now == 41


def test_a_fetch_shares_the_link_with_what_has_started_and_nothing_else_starts() -> None:
    clock = with_copies(0, 30)
    clock.run(4)  # of the first copy, 0.6 are left
    clock.fetch(2)
    # 1 s of launch; the copy lands 12 s later, when the fetch has done 6 of its 40 s
    assert clock.now == pytest.approx(4 + 1 + 12 + 34)
    assert [copy.expert for copy in clock.landed] == [0]
    assert clock.copies[0].left == 1
    clock.run(59)  # the thread has turned to the other one behind the fetch, 3 s later
    assert clock.copies[0].left == pytest.approx(0.5)


def test_a_copy_starts_some_time_after_the_request() -> None:
    clock = with_copies()
    assert isinstance(clock, ThreadClock)
    clock.run(10)
    clock.request(Copy(1, 1))
    assert clock.lands_at(clock.copies[0]) == 10 + 3 + 10
    clock.run(12)
    clock.fetch(1)  # before it has started
    assert clock.lands_at(clock.copies[0]) == 12 + 1 + 20 + 3 + 10


def test_a_fetch_that_ends_before_the_copy() -> None:
    clock = with_copies(0, 0)
    clock.copies[0].left = 5.0
    clock.fetch(1)
    assert clock.now == 41 and clock.copies[0].left == pytest.approx(5 - 2)


def test_a_thread_is_waited_for_where_that_is_sooner_than_a_fetch() -> None:
    clock = with_copies(0, 0, 0)
    first, second, third = clock.copies
    clock.run(4)
    assert [clock.is_sooner(copy) for copy in clock.copies] == [True, True, False]
    clock.wait([first, second])
    assert (clock.now, clock.landed) == (20, [first, second])
    clock.wait([first])  # has landed: the copy behind it does not matter
    assert clock.now == 20 and third.left == 1
    assert clock.cut(2) == [] and [*clock.copies] == [third]


def test_copy_kernels_stand_still_during_a_fetch() -> None:
    clock = with_copies(3, 20, link=GPU)
    first, second = clock.copies
    clock.run(13)
    assert first.left == pytest.approx(0.5)
    clock.fetch(2)
    assert clock.now == 13 + 1 + 40 and first.left == pytest.approx(0.5)
    clock.run(60)  # it went on at once
    assert first.left == pytest.approx(0.2)
    clock.run(66)
    assert clock.landed == [first] and second.left == pytest.approx(0.9)


def test_copy_kernels_bring_what_is_waited_for_and_what_is_before_it() -> None:
    clock = with_copies(0, 90, 90, link=GPU)
    first, second, third = clock.copies
    clock.run(15)
    assert all(clock.is_sooner(copy) for copy in clock.copies)
    clock.wait([second])  # has not started, and need not
    assert clock.now == 15 + 1 + 5 + 20
    assert clock.landed == [first, second] and third.left == 1


def test_copy_kernels_end_what_is_for_events_that_have_passed() -> None:
    clock = with_copies(0, 0, 0, link=GPU)
    first, second, third = clock.copies
    clock.run(5)
    assert clock.cut(1) == [first, second]
    assert [first.left, second.left] == [pytest.approx(0.75), 1]
    clock.run(15)  # the link was free for the next one
    assert [*clock.copies] == [third] and third.left == pytest.approx(0.5)


def test_what_copy_kernels_request() -> None:
    """One of what can begin in time: the most profitable of the earliest."""
    clock = with_copies(link=GPU)
    profit, seconds = np.array([5, 7, 9, 9, 1]), np.array([10.0, 5.0, 2.9, 10.0, 3.0])
    assert clock.order(profit, seconds, 5).tolist() == [4]
    assert clock.order(profit, seconds, 0).tolist() == []
    assert clock.order(profit[:4], seconds[:4], 5).tolist() == [1]
    clock = with_copies(0, link=GPU)
    clock.run(13)  # 7 s of another one before
    assert clock.order(profit, seconds, 5).tolist() == [3]


def test_what_a_thread_requests() -> None:
    """What can end in time, one after the other: the most profitable."""
    clock = with_copies()
    profit, seconds = np.array([5, 7, 9, 8, 6]), np.array([33.1, 13.1, 12.9, 23.1, 23.1])
    assert clock.order(profit, seconds, 5).tolist() == [1, 3, 0]
    loose = with_copies(link=replace(THREAD, slack=0.5))  # by half a fetch, as long as a copy
    assert loose.order(profit, seconds, 5).tolist() == [2, 1, 3, 0]


MOVES = st.one_of(
    st.tuples(st.just("request"), st.integers(0, 9)),
    st.tuples(st.just("run"), st.floats(0, 50)),
    st.tuples(st.just("fetch"), st.integers(1, 3)),
    st.tuples(st.just("wait"), st.integers(0, 3)),
    st.tuples(st.just("cut"), st.integers(0, 9)),
)


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(PREFETCH_BY),
    st.lists(MOVES, max_size=20),
    st.sampled_from([0.1, 0.37, 0.5]),
    st.sampled_from([0.0, 3.0, 30.0]),
)
def test_time_goes_on_and_the_link_is_no_faster_than_it_is(
    by: str, moves: list[tuple[str, float]], share: float, delay_s: float
) -> None:
    clock = clock_of(replace(THREAD, prefetch_by=by, fetch_share=share, delay_s=delay_s))
    rate = max(clock.link.fetch_bytes_per_s, clock.link.copy_bytes_per_s)
    copies: list[Copy] = []
    fetched = 0.0
    for move, value in moves:
        before, left = clock.now, {copy: copy.left for copy in copies}
        if move == "request":
            copies.append(Copy(len(copies), len(copies), due=int(value)))
            clock.request(copies[-1])
        elif move == "run":
            clock.run(clock.now + value)
            assert clock.now == before + value
        elif move == "fetch":
            clock.fetch(int(value))
            fetched += value
            alone = clock.link.launch_s + value * clock.link.fetch_s
            assert clock.now >= before + alone - 1e-9
        elif move == "wait":
            waited = list(clock.copies)[int(value) :]
            clock.wait(waited)
            assert not any(copy in clock.copies for copy in waited)
        else:
            ended = clock.cut(int(value))
            assert by == "gpu" or not ended
            assert by == "thread" or all(copy.due > value for copy in clock.copies)
        assert clock.now >= before
        assert all(-1e-12 <= copy.left <= then for copy, then in left.items())
        assert all(copy.left == 0 for copy in clock.landed)
        moved = fetched + sum(1 - copy.left for copy in copies)
        assert moved * clock.link.record_bytes <= rate * clock.now * (1 + 1e-9) + 1e-9
