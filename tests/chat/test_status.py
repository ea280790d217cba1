from __future__ import annotations

import pytest

from seqmoe_cli.chat import status
from seqmoe_cli.engine.stats import Step, TurnStats
from seqmoe_cli.residency.stats import StepStats
from seqmoe_weights.files import readable_size

GIB = 2**30


def _turn() -> TurnStats:
    turn = TurnStats(prompt_tokens=900)
    turn.add(Step(1, None, StepStats("prefill", 58, 10, 40, 4 * 10**9, 0.5)))
    for _ in range(303):
        turn.add(Step(2, None, StepStats("decode", 1, 90, 2, 10**7, 0.02)))
    turn.add(Step(None, "stop", StepStats("decode", 1, 90, 2, 10**7, 0.02)))
    return turn


def test_live_line() -> None:
    line = status.live_line(_turn(), 8192, 5 * GIB + GIB // 5, 200)
    assert line == (
        "ctx 1,204/8,192 | 50.0 tok/s | hit 97.7% | miss 2.0/tok | fetch 1.1 GB/s | pool 5.20 GiB"
    )
    hidden = status.live_line(_turn(), 8192, 5 * GIB, 200, thinking=True)
    assert hidden.startswith("thinking | ctx 1,204/8,192 | ")


def test_prefetch_is_shown() -> None:
    turn = TurnStats(prompt_tokens=9)
    costs = StepStats("decode", 2, 90, 2, 10**7, 0.02, prefetched_bytes=3 * 2**20, prefetch_hits=5)
    turn.add(Step(2, None, costs))
    line = status.live_line(turn, 64, GIB, 200, prefetch="on")
    assert line.endswith(" | fetch 657.3 MB/s | prefetch 2.5/tok in time | pool 1.00 GiB")
    for word in ("resting", "stopped"):
        line = status.live_line(turn, 64, GIB, 200, prefetch=word)
        assert f" | prefetch {word} | pool" in line
    assert status.turn_line(turn, False, 200).endswith(" | prefetch 5 in time, 3.0 MiB")


def test_eviction_by_a_forecast_is_shown() -> None:
    turn = TurnStats(prompt_tokens=9)
    turn.add(Step(2, None, StepStats("decode", 3, 90, 2, 10**7, 0.02, eviction_rested_tokens=3)))
    for word in ("on", "comparing", "resting"):
        line = status.live_line(turn, 64, GIB, 200, eviction=word)
        assert f" | forecast {word} | pool" in line
    assert status.turn_line(turn, False, 200).endswith(" | forecast rested")
    compared = {"missed_by_forecast": 5, "missed_by_counts": 11}
    turn.add(Step(2, None, StepStats("decode", 4, 90, 2, 10**7, 0.02, **compared)))
    line = status.live_line(turn, 64, GIB, 200, "", eviction="on")
    assert line.endswith(" | forecast +1.5 hit/tok | pool 1.00 GiB")
    assert " | forecast resting | " in status.live_line(turn, 64, GIB, 200, eviction="resting")
    assert status.turn_line(turn, False, 200).endswith(" | forecast +1.5 hit/tok")


def test_turn_line() -> None:
    assert status.turn_line(_turn(), True, 200) == (
        "304 tokens, 50.0 tok/s | prompt 58 tokens in 0.50 s | hit 97.7% (cold pool)"
    )
    one = TurnStats(prompt_tokens=1)
    one.add(Step(1, "length", StepStats("prefill", 1, 0, 4, 100, 0.25)))
    assert status.turn_line(one, False, 200) == (
        "1 token, 0.0 tok/s | prompt 1 token in 0.25 s | hit 0.0%"
    )


def test_prefill_line() -> None:
    assert status.prefill_line(2048, 7900, 1.7, 80) == "prompt 2,048/7,900 | 1,205 tok/s"
    assert status.prefill_line(0, 7900, 0.0, 80) == "prompt 0/7,900"


def test_idle_line() -> None:
    assert status.idle_line(12, 2048, 300 * 2**20, 80) == "ctx 12/2,048 | pool 300.0 MiB | /help"


def test_fields_go_from_the_right() -> None:
    full = status.live_line(_turn(), 8192, 5 * GIB, 200)
    fields = full.split(" | ")
    for width in range(100):
        line = status.live_line(_turn(), 8192, 5 * GIB, width)
        assert len(line) <= width and full.startswith(line)
        if width >= len(fields[0]):  # whole fields, and as many as fit
            count = len(line.split(" | "))
            assert line == " | ".join(fields[:count])
            assert count == len(fields) or len(" | ".join(fields[: count + 1])) > width


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0.0 MiB"), (3 * 2**19, "1.5 MiB"), (GIB, "1.00 GiB"), (1500 * GIB, "1,500.00 GiB")],
)
def test_sizes(number: int, text: str) -> None:
    assert readable_size(number) == text


def test_what_eviction_was_worth() -> None:
    assert status.eviction_line(3.21, 0.31e-3, 0.04) == (
        "the forecast saved 3.2 misses (0.31 ms) a step, all in all it saved 4.0% of it"
    )
    cost = status.eviction_line(-1.0, -1e-4, -0.05)
    assert cost.startswith("the forecast cost 1.0 misses") and cost.endswith("it cost 5.0% of it")


def test_what_prefetch_was_worth() -> None:
    line = status.worth_line(0.023, 1.5)
    assert line == "prefetch saved 2.3% of a step when it was last compared, 1.5 copies a use"
    assert status.worth_line(-0.1, None).startswith("prefetch cost 10.0% of a step")
    assert status.worth_line(-0.1, None).endswith(", no copy was of use")
