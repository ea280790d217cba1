"""What is asked without a chat: a text, a conversation in a file, or a file of many of them.

Everything is read and checked before the model is loaded. Knows no model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from seqmoe_cli.chat.session import Message
from seqmoe_cli.errors import PromptError, UsageError, either
from seqmoe_cli.text.files import STDIN, check_text, parse_json, read_text

ROLES = ("system", "user", "assistant")
_PROMPTS_HINT = (
    'use ["a text", ["first turn", "second turn"], [{"role": "user", "content": "..."}]]'
)
_MESSAGES_HINT = 'use [{"role": "user", "content": "..."}]'


@dataclass(frozen=True)
class Sources:
    """The flags that say what is asked, as they were given."""

    prompt: str | None = None
    file: str | None = None
    messages: str | None = None
    raw: bool = False
    system: str | None = None
    system_file: str | None = None


@dataclass(frozen=True)
class Question:
    """What is asked: a `raw` text, or messages without the system prompt. Neither: nothing yet, so
    talk."""

    raw: str | None = None
    messages: tuple[Message, ...] = ()
    system: str = ""

    @property
    def is_open(self) -> bool:
        """True when there is no prompt."""
        return self.raw is None and not self.messages


def read_question(sources: Sources) -> Question:
    """Read what the flags name; raises `UsageError` for flags that exclude each other and where
    there is no text, `PromptError` for a file that is empty, unreadable or malformed."""
    _check_conflicts(sources)
    system = check_text("--system", sources.system or "")
    if sources.system_file is not None:
        system = _nonempty("--system-file", sources.system_file).rstrip("\n")
    if sources.messages is not None:
        messages = read_messages(sources.messages)
        if system and messages[0]["role"] == "system":
            raise UsageError(
                f"--messages {sources.messages} has a system message of its own",
                "leave out -s and --system-file",
            )
        return Question(None, tuple(messages), system)
    text = read_prompt(sources.prompt, sources.file, sources.raw)
    if sources.raw:
        if text is None:
            raise UsageError("--raw needs a text", "give -p, -f or a text on standard input")
        return Question(text)
    return Question(None, ({"role": "user", "content": text},) if text else (), system)


def _check_conflicts(sources: Sources) -> None:
    system = sources.system is not None or sources.system_file is not None
    pairs = (
        ("--messages", sources.messages is not None, "-p", sources.prompt is not None),
        ("--messages", sources.messages is not None, "-f", sources.file is not None),
        ("--raw", sources.raw, "--messages", sources.messages is not None),
        ("--raw", sources.raw, "a system prompt", system),
        ("-s", sources.system is not None, "--system-file", sources.system_file is not None),
    )
    for first, has_first, second, has_second in pairs:
        if has_first and has_second:
            raise UsageError(f"{first} and {second} exclude each other", "leave one out")


def read_prompt(prompt: str | None, file: str | None, raw: bool) -> str | None:
    """The texts of -p, then -f, then piped standard input, joined by a blank line.

    With `raw` each is taken as it is; else newlines at its end are dropped. None when there is no
    prompt and standard input is a terminal. Raises `UsageError` for an empty one, `PromptError` for
    a file that is empty or unreadable.
    """
    parts = [] if prompt is None else [check_text("--prompt", prompt)]
    if file is not None:
        parts.append(_nonempty("--file", file))
    piped = sys.stdin is None or not sys.stdin.isatty()
    if piped and file != STDIN:
        parts.append(read_text("standard input", STDIN))
    if not raw:
        parts = [part.rstrip("\n") for part in parts]
    text = "\n\n".join(part for part in parts if part)
    if text if raw else text.strip():
        return text
    if parts:
        raise UsageError("there is no prompt", "give -p TEXT, -f FILE or a text on standard input")
    return None


def _nonempty(flag: str, file: str) -> str:
    text = read_text(flag, file)
    if not text.strip():
        raise PromptError(f"{flag} {file} is empty", "give a file with some text")
    return text


def read_messages(file: str) -> list[Message]:
    """A conversation: a JSON list of objects with `role` and `content`, the last one a user's.

    Raises `PromptError` naming the file and the message.
    """
    name = f"--messages {file}"
    value = parse_json(name, read_text("--messages", file), _MESSAGES_HINT)
    return check_messages(name, value)


def check_messages(name: str, value: object) -> list[Message]:
    """`value` as a conversation; raises `PromptError` that starts with `name` if it is none."""
    if not isinstance(value, list) or not value:
        raise PromptError(f"{name} is not a list of messages", _MESSAGES_HINT)
    messages = [_message(f"{name}: message {n}", item) for n, item in enumerate(value, 1)]
    if messages[-1]["role"] != "user":
        raise PromptError(f"{name}: the last message is not the user's", _MESSAGES_HINT)
    return messages


def _message(label: str, item: object) -> Message:
    if not isinstance(item, dict):
        raise PromptError(f"{label} is no object", _MESSAGES_HINT)
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise PromptError(f"{label} has the role {role!r}", f"use {either(ROLES)}")
    if not isinstance(content, str):
        raise PromptError(f"{label} has no text in content", _MESSAGES_HINT)
    return {"role": role, "content": check_text(label, content, _MESSAGES_HINT)}


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
        values = [(label, parse_json(label, line, _PROMPTS_HINT)) for label, line in lines]
    else:
        whole = parse_json(name, text, _PROMPTS_HINT)
        if not isinstance(whole, list):
            raise PromptError(f"{name} is not a list of prompts", _PROMPTS_HINT)
        values = [(f"{name}: prompt {n}", value) for n, value in enumerate(whole, 1)]
    if not values:
        raise PromptError(f"{name} holds no prompt", _PROMPTS_HINT)
    return [_conversation(label, value) for label, value in values]


def _conversation(label: str, value: object) -> Conversation:
    turns = list(_texts([value] if isinstance(value, str) else value))
    if turns:
        if not all(turn.strip() for turn in turns):
            raise PromptError(f"{label} has no text", _PROMPTS_HINT)
        return Conversation(
            label, (), tuple(check_text(label, turn, _PROMPTS_HINT) for turn in turns)
        )
    *said, last = check_messages(label, value)
    return Conversation(label, tuple(said), (last["content"],))


def _texts(value: object) -> Iterator[str]:
    """The items of a list of nothing but texts."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        yield from value
