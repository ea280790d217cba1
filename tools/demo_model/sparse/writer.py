"""Models write conversations for the student to learn from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.sparse.chat import (
    ASSISTANT_TURN,
    check_prompts,
    continued,
    conversation_flow,
    fixed_prompts,
    openings,
    prompt_rows,
)
from tools.demo_model.sparse.decoder import Decoder
from tools.demo_model.sparse.sampler import Choice, Request, sample

MIN_P = 0.02
LEAST_DISTINCT = 0.2  # distinct tokens of a row over its length; less is a loop


class Clock:
    """Time since the start, for the log and the limits."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def log(self, text: str) -> None:
        print(f"[{self.seconds():6.1f} s] {text}", flush=True)


@dataclass(frozen=True)
class Pen:
    """How a model writes: temperatures from the `coolest` to the `warmest`, the repetition
    penalty, the share of conversations whose first user turn is left to it, the share that takes
    up earlier ones again (at most), tokens a row."""

    coolest: float
    warmest: float
    penalty: float
    free: float
    again: float
    length: int
    compiled: bool


class Writer:
    """Has conversations written: everyday questions, those of corpora, and follow-ups."""

    def __init__(self, tokenizer: Tokenizer, questions: list[str], pen: Pen, seed: int) -> None:
        self._tokenizer, self._pen, self._seed = tokenizer, pen, seed
        self._beginnings: Iterator[tuple[str, int]] = openings(questions, seed, pen.free)
        self._earlier: list[list[int]] = []

    def write(self, model: Decoder, number: int) -> Tensor:
        """Conversations, some of them earlier ones taken up behind the first answer with an
        everyday follow-up: int32 [number, T]."""
        pen, device = self._pen, model.embedding.device
        self._seed += 1
        some = self._earlier[: round(number * pen.again)]
        prompts = continued(self._tokenizer, some, self._seed)
        states = [ASSISTANT_TURN] * len(prompts)
        opened = list(islice(self._beginnings, number - len(prompts)))
        prompts += [e.ids for e in self._tokenizer.encode_batch([text for text, _ in opened])]
        states += [state for _, state in opened]
        span = pen.warmest - pen.coolest
        request = Request(
            prompt_rows(prompts, pen.length).to(device),
            torch.tensor(states, device=device),
            pen.coolest + span * torch.rand(number, device=device),
        )
        flow = conversation_flow(self._tokenizer, device, follow_up=True)
        rows = sample(model, request, flow, Choice(MIN_P, pen.penalty), pen.compiled).int()
        self._earlier = rows[-round(number * pen.again) :].tolist() if pen.again else []
        return rows


def write_chats(teacher: Decoder, writer: Writer, options: Any, clock: Clock) -> Tensor:
    """Conversations that the teacher writes until its time is up, without those that loop: int32
    [R, T]."""
    begun = clock.seconds()
    batches: list[Tensor] = []
    spent = 0.0
    while spent * (len(batches) + 1) <= options.write_seconds * len(batches):
        batches.append(writer.write(teacher, options.write_rows))
        spent = clock.seconds() - begun
        clock.log(f"{sum(map(len, batches))} conversations written")
    rows = torch.cat(batches)
    return rows[num_distinct(rows) >= LEAST_DISTINCT * rows.shape[1]]


def without_kept_prompts(rows: Tensor, tokenizer: Tokenizer) -> Tensor:
    """The rows [R, T] that hold none of the prompts that are kept for the end."""
    kept = [turn for turns in (*fixed_prompts(), *check_prompts()) for turn in turns]
    found = [contains(rows, encoding.ids) for encoding in tokenizer.encode_batch(kept)]
    return rows[~torch.stack(found).any(dim=0)]


def num_distinct(rows: Tensor) -> Tensor:
    """How many different tokens each row [R, T] has: int64 [R]."""
    return 1 + (rows.sort(dim=1).values.diff(dim=1) != 0).sum(dim=1)


def contains(rows: Tensor, pattern: list[int]) -> Tensor:
    """Which rows [R, T] hold the tokens of `pattern` one behind the other: bool [R]."""
    places = rows.shape[1] - len(pattern) + 1
    found = torch.ones(len(rows), places, dtype=torch.bool, device=rows.device)
    for i, token in enumerate(pattern):
        found &= rows[:, i : i + places] == token
    return found.any(dim=1)
