"""The matrix of benchmark cases: what is run, and how much context it needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seqmoe_cli.errors import UsageError

MAX_TOKENS = 2**20  # beyond any context; larger numbers are typing errors


@dataclass(frozen=True)
class Case:
    """One thing to time: a prompt of `num_prompt` tokens or `num_gen` generated ones (the other is
    0), behind a context of `depth` tokens that is not timed.

    The `num_untimed` steps before those that are timed begin with the one token of a prompt.
    """

    num_prompt: int
    num_gen: int
    depth: int
    num_untimed: int = 0

    @property
    def name(self) -> str:
        """As llama-bench spells it: `pp512`, `tg128 @ d4096`."""
        test = f"pp{self.num_prompt}" if self.num_prompt else f"tg{self.num_gen}"
        return f"{test} @ d{self.depth}" if self.depth else test

    @property
    def num_timed(self) -> int:
        """Tokens that go through the model while the clock runs."""
        return self.num_prompt or self.num_gen

    @property
    def text_tokens(self) -> int:
        """Tokens of text that the case reads: generation goes on from the one behind the depth."""
        return self.depth + (self.num_prompt or 1)

    @property
    def ctx_size(self) -> int:
        """KV capacity that the case needs; a prompt is always followed by one sampled token."""
        return self.depth + self.num_timed + (self.num_untimed or 1)

    @property
    def mean_context(self) -> float:
        """Tokens that a timed step finds in the KV state, on average."""
        return self.depth + self.num_untimed + (self.num_timed - 1) / 2


def make_cases(
    prompts: Sequence[int], gens: Sequence[int], depths: Sequence[int]
) -> tuple[Case, ...]:
    """The cross product, depth by depth, prompts first; zeros in `prompts` and `gens` drop out."""
    cases = [
        case
        for depth in depths
        for case in (
            *(Case(num, 0, depth) for num in prompts if num),
            *(Case(0, num, depth, num_untimed=1) for num in gens if num),
        )
    ]
    if not cases:
        raise UsageError("-p and -n are both 0: nothing to measure", "give one of them a number")
    return tuple(dict.fromkeys(cases))


def parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """Read `512` or `16,32`; raises `UsageError` naming `flag` for anything but whole numbers."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) <= MAX_TOKENS for word in words):
        raise UsageError(
            f"{flag} {text!r} is not a list of token counts",
            f"use whole numbers from 0 to {MAX_TOKENS}, several of them with commas: 128,512",
        )
    return tuple(dict.fromkeys(int(word) for word in words))
