"""The matrix of cases: names, the cross product, what a case needs, and refused lists."""

from __future__ import annotations

import pytest

from seqmoe_cli.bench.matrix import MAX_TOKENS, Case, make_cases, parse_counts
from seqmoe_cli.errors import UsageError


def test_lists_make_the_cross_product_depth_by_depth() -> None:
    names = [case.name for case in make_cases((16, 32), (8,), (0, 64))]
    assert names == ["pp16", "pp32", "tg8", "pp16 @ d64", "pp32 @ d64", "tg8 @ d64"]


def test_zero_leaves_a_kind_out() -> None:
    assert [case.name for case in make_cases((0,), (8,), (0,))] == ["tg8"]
    assert [case.name for case in make_cases((4, 0), (0,), (0,))] == ["pp4"]
    with pytest.raises(UsageError, match="-p and -n are both 0"):
        make_cases((0,), (0,), (0, 5))


def test_what_a_case_needs() -> None:
    prompt, gen = make_cases((16,), (8,), (5,))
    assert (prompt.text_tokens, prompt.ctx_size) == (21, 22)
    assert (gen.text_tokens, gen.ctx_size) == (6, 14)
    assert gen.mean_context == (6 + 13) / 2  # the first timed step sees 6 tokens, the last 13
    replayed = Case(0, 8, 5, num_untimed=20)
    assert (replayed.text_tokens, replayed.ctx_size, replayed.name) == (6, 33, "tg8 @ d5")


def test_counts_are_read_once_each() -> None:
    assert parse_counts("-n", "16, 32,16") == (16, 32)
    assert parse_counts("-n", "0") == (0,)


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1.5", "nan", "8,", "1e3", "²", str(MAX_TOKENS + 1)]
)
def test_other_counts_are_refused_by_flag_and_value(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_counts("-n", text)
    assert f"-n {text!r}" in caught.value.message
    assert caught.value.hint
