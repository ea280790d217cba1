"""The teacher writes conversations for its student to learn from."""

from __future__ import annotations

import time
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.sparse.chat import (
    ASSISTANT_TURN,
    continued,
    conversation_flow,
    fixed_prompts,
    openings,
    prompt_rows,
)
from tools.demo_model.sparse.decoder import Decoder
from tools.demo_model.sparse.sampler import Request, sample

MIN_P = 0.02
COOLEST, WARMEST = 0.3, 1.0  # temperatures
LEAST_DISTINCT = 0.2  # distinct tokens of a row over its length; less is a loop


class Clock:
    """Time since the start, for the log and the limits."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def log(self, text: str) -> None:
        print(f"[{self.seconds():6.1f} s] {text}", flush=True)


def write_chats(
    teacher: Decoder, tokenizer: Tokenizer, questions: list[str], options: Any, clock: Clock
) -> Tensor:
    """Conversations that the teacher writes until its time is up: int32 [R, T].

    Every third batch takes up the one before it again, with everyday follow-ups.
    """
    device = teacher.embedding.device
    begun, beginnings = clock.seconds(), openings(questions, seed=1)
    batches: list[Tensor] = []
    spent = 0.0
    while spent * (len(batches) + 1) <= options.write_seconds * len(batches):
        if len(batches) % 3 == 2:
            prompts = continued(tokenizer, batches[-1].tolist(), seed=len(batches))
            states = [ASSISTANT_TURN] * len(prompts)
        else:
            opened = [next(beginnings) for _ in range(options.write_rows)]
            prompts = [e.ids for e in tokenizer.encode_batch([text for text, _ in opened])]
            states = [state for _, state in opened]
        batches.append(_write(teacher, tokenizer, prompts, states, options.length))
        spent = clock.seconds() - begun
        clock.log(f"{sum(map(len, batches))} conversations written")
    torch.cuda.empty_cache()  # the KV state took half of the memory
    rows = torch.cat(batches).to(device)
    rows = rows[num_distinct(rows) >= LEAST_DISTINCT * options.length]
    banned = [tokenizer.encode(turn).ids for turns in fixed_prompts() for turn in turns]
    return rows[~torch.stack([contains(rows, ids) for ids in banned]).any(dim=0)]


def _write(
    teacher: Decoder,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    states: list[int],
    length: int,
) -> Tensor:
    device = teacher.embedding.device
    temperatures = COOLEST + (WARMEST - COOLEST) * torch.rand(len(prompts), device=device)
    request = Request(
        prompt_rows(prompts, length).to(device), torch.tensor(states, device=device), temperatures
    )
    flow = conversation_flow(tokenizer, device, follow_up=True)
    return sample(teacher, request, flow, MIN_P).int().cpu()


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
