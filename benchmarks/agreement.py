"""Whether an engine that has been through a lot says what a fresh one says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.stats import Step
from seqmoe_cli.settings import SamplingParams

GREEDY = SamplingParams(temperature=0)
COMPARED_TOKENS = 24
# What rounding may do when the same tokens are evaluated in other pieces. A router that is
# undecided between two experts may take the other one, which changes all later rows of that token.
NEAR_TIE = 0.05  # nats between two tokens that may then come in either order
WRONG_ROWS = 0.5  # squared relative error of keys or values, added up over the tokens of a layer
FIRST_WRONG_ROWS = 1e-6  # the same in the first layer, which no router comes before


class Violation(Exception):
    """Something that must agree does not."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


class WatchedEngine(Engine):
    """Remembers the last stream: what was asked, what came, and why it ended."""

    asked: list[int] | None = None
    given: Sequence[int] = ()
    ended: str | None = None
    evaluated = 0

    def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, **ends: Any
    ) -> Iterator[Step]:
        self.asked, given, self.ended = list(prompt_ids), [], None
        self.given = given
        for step in super().generate(prompt_ids, sampling, **ends):
            self.evaluated += step.stats.num_tokens
            self.ended = step.finish_reason
            if step.token_id is not None:
                given.append(step.token_id)
            yield step


class Comparison:
    """An engine and a reference, asked the same. `most_wrong_rows`, `near_ties`: so far."""

    def __init__(self, engine: Engine, reference: Engine) -> None:
        self.engine, self.reference = engine, reference
        self.most_wrong_rows = 0.0
        self.near_ties = 0

    def continued(self, prompt: list[int]) -> None:
        """Go on from the KV state that the engine has; the reference evaluates the same tokens
        afresh. Raises `Violation` when the difference is more than rounding."""
        text = greedy(self.engine, prompt)
        self.reference.reset_kv()
        expected = greedy(self.reference, prompt)
        pairs = enumerate(zip(text, expected, strict=True))
        split = next((n for n, (ours, theirs) in pairs if ours != theirs), None)
        held = len(prompt) + (len(text) - 1 if split is None else split)
        lists = [engine.token_ids[:held] for engine in (self.engine, self.reference)]
        require(lists[0] == lists[1], "the same text, but other tokens in the KV state")
        self._require_close(held)
        if split is not None:
            self._require_near_tie([*prompt, *text[:split]], text[split], expected[split])
            self.near_ties += 1

    def fresh(self, prompt: list[int]) -> None:
        """Evaluate the same tokens in the same pieces: every bit of the KV states must agree."""
        texts = []
        for engine in (self.engine, self.reference):
            engine.reset_kv()
            texts.append(greedy(engine, prompt))
        require(texts[0] == texts[1], f"fresh engines differ: {texts[0]} and {texts[1]}")
        held = len(self.engine.token_ids)
        for name in ("keys", "values"):
            ours, theirs = (
                getattr(engine.kv, name)[:, :held] for engine in (self.engine, self.reference)
            )
            require(torch.equal(ours, theirs), f"{name} of fresh engines differ")

    def _require_close(self, held: int) -> None:
        """The KV states of the first `held` tokens."""
        for name in ("keys", "values"):
            ours, theirs = (
                getattr(engine.kv, name)[:, :held].double().flatten(2)
                for engine in (self.engine, self.reference)
            )
            errors = ((ours - theirs).square().sum(2) / theirs.square().sum(2)).sum(1)
            first, most = float(errors[0]), float(errors.max())
            self.most_wrong_rows = max(self.most_wrong_rows, most)
            require(
                first < FIRST_WRONG_ROWS and most < WRONG_ROWS,
                f"{name} of the KV state: {most:.2g} wrong rows, {first:.2g} in the first layer",
            )

    def _require_near_tie(self, ids: list[int], ours: int, theirs: int) -> None:
        scores = [
            float(self.reference.log_likelihoods([*ids, token])[-1]) for token in (ours, theirs)
        ]
        require(
            abs(scores[0] - scores[1]) < NEAR_TIE,
            f"the reference goes on with {theirs}, not {ours}, by {scores}",
        )


def greedy(engine: Engine, prompt: list[int]) -> list[int]:
    """`COMPARED_TOKENS` tokens; nothing else ends the answer."""
    steps = engine.generate(prompt, GREEDY, max_tokens=COMPARED_TOKENS)
    return [step.token_id for step in steps if step.token_id is not None]
