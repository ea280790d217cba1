"""ChatML as token ids: prompts, everyday questions, and how a conversation goes on by itself."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.sparse.sampler import FREE, Flow

HERE = Path(__file__).parent
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
USER_TURN, ASSISTANT_TURN, STOPPED = 0, 1, 2  # states of `conversation_flow`


def render(turns: Iterable[tuple[str, str]], system: str | None = SYSTEM) -> str:
    """Pairs of role and content in SmolLM2's chat template."""
    opening = [("system", system)] if system else []
    said = [*opening, *turns]
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in said)


def opened(turns: Iterable[tuple[str, str]], role: str, system: str | None = SYSTEM) -> str:
    """The conversation so far and the header of the turn that comes next."""
    return render(turns, system) + f"<|im_start|>{role}\n"


def conversation_flow(tokenizer: Tokenizer, device: torch.device, follow_up: bool) -> Flow:
    """Turns alternate between user and assistant, or stop behind the assistant's."""
    end, other_end = tokenizer.encode("<|im_end|><|endoftext|>").ids
    forced, after = [FREE, FREE, end], [USER_TURN, ASSISTANT_TURN, STOPPED]
    first = []
    for role, turn in (("assistant", ASSISTANT_TURN), ("user", USER_TURN)):
        header = tokenizer.encode(f"\n<|im_start|>{role}\n").ids
        first.append(len(forced))
        forced += header
        after += [*range(first[-1] + 1, len(forced)), turn]
    at_end = [first[0], first[1] if follow_up else STOPPED, *after[2:]]
    tables = [torch.tensor(table, device=device) for table in (forced, after, at_end)]
    return Flow(tables[0], tables[1], tables[2], (end, other_end))


def fixed_prompts() -> list[list[str]]:
    """The user turns that the model card shows; never trained on."""
    return _prompts("prompts.json")


def check_prompts() -> list[list[str]]:
    """User turns of the same kinds, a hundred conversations, to count the answers that end; left
    out of the second training."""
    return _prompts("check.json")


def _prompts(file: str) -> list[list[str]]:
    prompts: list[list[str]] = json.loads((HERE / file).read_text())
    return prompts


class Everyday:
    """Everyday user turns: templates of `everyday.json` with their slots filled by chance."""

    def __init__(self, seed: int) -> None:
        content: dict[str, Any] = json.loads((HERE / "everyday.json").read_text())
        self._slots: dict[str, list[str]] = content["slots"]
        self._templates: list[str] = content["templates"]
        self._follow_ups: list[str] = content["follow_ups"]
        self.systems: list[str] = content["systems"]
        self._random = random.Random(seed)
        self._banned = {turn for turns in (*fixed_prompts(), *check_prompts()) for turn in turns}

    def question(self) -> str:
        """One user turn that is not among the prompts kept for the end."""
        while (text := self._fill(self._random.choice(self._templates))) in self._banned:
            pass
        return text

    def follow_up(self) -> str:
        """One later user turn, likewise."""
        while (text := self._fill(self._random.choice(self._follow_ups))) in self._banned:
            pass
        return text

    def _fill(self, template: str) -> str:
        for slot, words in self._slots.items():
            while "{" + slot + "}" in template:
                template = template.replace("{" + slot + "}", self._random.choice(words), 1)
        return template


def openings(questions: list[str], seed: int, free: float) -> Iterator[tuple[str, int]]:
    """Endless beginnings of conversations and the state that each is in.

    The share `free` leaves even the user's turn to the model; of the others, two in three ask an
    everyday question, one asks one of `questions`. One in eight has another system prompt than the
    template's own.
    """
    everyday, chance = Everyday(seed), random.Random(seed)
    while True:
        system = chance.choice(everyday.systems) if chance.random() < 0.125 else SYSTEM
        if chance.random() < free:
            yield opened([], "user", system), USER_TURN
        else:
            common = chance.random() < 2 / 3
            asked = everyday.question() if common else chance.choice(questions)
            yield opened([("user", asked)], "assistant", system), ASSISTANT_TURN


def continued(tokenizer: Tokenizer, rows: list[list[int]], seed: int) -> list[list[int]]:
    """Conversations cut behind the first answer and continued with an everyday follow-up.

    Rows whose first answer takes more than half of them are left out.
    """
    everyday, (end,) = Everyday(seed), tokenizer.encode("<|im_end|>").ids
    found = []
    for row in rows:
        ends = [i for i, token in enumerate(row) if token == end]
        if len(ends) > 2 and ends[2] < len(row) // 2:  # system, user, assistant
            asked = f"\n{render([('user', everyday.follow_up())], None)}<|im_start|>assistant\n"
            found.append(row[: ends[2] + 1] + tokenizer.encode(asked).ids)
    return found


def prompt_rows(prompts: list[list[int]], length: int) -> Tensor:
    """Prompts of token ids as rows, FREE behind each: int64 [B, length]. A prompt that leaves no
    room for an answer is a ValueError."""
    for ids in prompts:
        if len(ids) >= length:
            raise ValueError(f"a prompt of {len(ids)} tokens; {length} is the limit")
    return torch.tensor([ids + [FREE] * (length - len(ids)) for ids in prompts])
