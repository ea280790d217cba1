"""Windows over a long text: every token but the first is predicted exactly once."""

from __future__ import annotations

from itertools import pairwise

import pytest

from seqmoe_cli.bench.perplexity import windows


@pytest.mark.parametrize("size", [2, 3, 7, 8, 9, 100])
@pytest.mark.parametrize("num_tokens", [2, 3, 7, 8, 9, 15, 16, 40])
def test_every_token_is_predicted_once_from_its_window(num_tokens: int, size: int) -> None:
    parts = windows(num_tokens, size)
    predicted = [token for part in parts for token in part[1:]]
    assert predicted == list(range(1, num_tokens))
    assert all(2 <= len(part) <= size for part in parts)
    assert all(after[0] == before[-1] for before, after in pairwise(parts))


def test_a_text_that_fits_is_one_window() -> None:
    assert windows(8, 8) == [range(8)]
