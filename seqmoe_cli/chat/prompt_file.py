"""A file of many prompts: texts and conversations, as JSON or one JSON value a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from seqmoe_cli.chat.prompt import check_messages
from seqmoe_cli.chat.session import Message
from seqmoe_cli.errors import PromptError
from seqmoe_cli.text.files import check_text, parse_json, read_text

_HINT = 'use ["a text", ["first turn", "second turn"], [{"role": "user", "content": "..."}]]'


@dataclass(frozen=True)
class Conversation:
    """Messages that were said, and then the turns of a user that are to be answered one by one.
    `name` says where it is from."""

    name: str
    said: tuple[Message, ...]
    turns: tuple[str, ...]


def read_prompts(flag: str, file: str) -> list[Conversation]:
    """Every prompt of a JSON list; of each line, if the file's name ends in .jsonl.

    A prompt is a text, a list of texts, which are the turns of one conversation, or a list of
    messages, the last one a user's. Raises `PromptError` naming flag, file and prompt.
    """
    name = f"{flag} {file}"
    text = read_text(flag, file)
    if file.endswith(".jsonl"):
        lines = [
            (f"{name}: line {n}", line)
            for n, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
        values = [(label, parse_json(label, line, _HINT)) for label, line in lines]
    else:
        whole = parse_json(name, text, _HINT)
        if not isinstance(whole, list):
            raise PromptError(f"{name} is not a list of prompts", _HINT)
        values = [(f"{name}: prompt {n}", value) for n, value in enumerate(whole, 1)]
    if not values:
        raise PromptError(f"{name} holds no prompt", _HINT)
    return [_conversation(label, value) for label, value in values]


def _conversation(label: str, value: object) -> Conversation:
    turns = list(_texts([value] if isinstance(value, str) else value))
    if turns:
        if not all(turn.strip() for turn in turns):
            raise PromptError(f"{label} has no text", _HINT)
        return Conversation(label, (), tuple(check_text(label, turn, _HINT) for turn in turns))
    *said, last = check_messages(label, value)
    return Conversation(label, tuple(said), (last["content"],))


def _texts(value: object) -> Iterator[str]:
    """The items of a list of nothing but texts."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        yield from value
