"""The link: times by hand, for round numbers."""

from __future__ import annotations

import pytest

from seqmoe_cli.replay.link import Copy, Link, LinkClock

# A copy takes 10 s, a fetch 20 s; while they share the link, both run at half their speed.
LINK = Link(
    record_bytes=100,
    layer_s=5.0,
    fetch_bytes_per_s=5.0,
    dma_bytes_per_s=10.0,
    launch_s=1.0,
    delay_s=3.0,
    fetch_share=0.5,
)


def with_copies(*start_s: float) -> LinkClock:
    clock = LinkClock(LINK)
    clock.copies += [Copy(number, number, start_s=start) for number, start in enumerate(start_s)]
    return clock


def test_copies_run_one_after_the_other() -> None:
    clock = with_copies(3, 4, 40)
    assert [clock.lands_at(copy) for copy in clock.copies] == [13, 23, 50]
    clock.run(14)
    assert [copy.expert for copy in clock.landed] == [0]
    assert clock.copies[0].left == pytest.approx(0.9)
    assert clock.backlog_s() == pytest.approx(9 + 10)
    clock.run(30)
    assert [copy.expert for copy in clock.landed] == [0, 1]
    assert clock.copies[0].left == 1 and clock.now == 30
    clock.run(60)
    assert not clock.copies


def test_a_fetch_alone() -> None:
    clock = with_copies()
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
