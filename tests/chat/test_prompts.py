"""Files of many prompts: every form a prompt may have, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seqmoe_cli.chat.prompt import read_prompts
from seqmoe_cli.errors import PromptError

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
PROMPTS: list[Any] = ["Hello\u2028 there", ["one", "two"], MESSAGES]


@pytest.mark.parametrize("name", ["prompts.json", "prompts.jsonl"])
def test_every_form(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in PROMPTS]
    path.write_text("\n\n".join(lines) if name.endswith("l") else json.dumps(PROMPTS), "utf-8")
    found = read_prompts("--prompts", str(path))
    assert [c.turns for c in found] == [("Hello\u2028 there",), ("one", "two"), ("c",)]
    assert [c.said for c in found] == [(), (), tuple(MESSAGES[:3])]
    numbers = ("line 1", "line 3", "line 5") if name.endswith("l") else (1, 2, 3)
    assert [c.name.split(" ", 2)[2] for c in found] == [
        n if isinstance(n, str) else f"prompt {n}" for n in numbers
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("{}", "is not a list of prompts"),
        ('"hello"', "is not a list of prompts"),
        ("[]", "holds no prompt"),
        ('["a", " "]', "prompt 2 has no text"),
        ('["a", ["b", ""]]', "prompt 2 has no text"),
        ('["a", []]', "prompt 2 is not a list of messages"),
        ('["a", 3]', "prompt 2 is not a list of messages"),
        ('["a", ["b", 3]]', "prompt 2: message 1 is no object"),
        ('[[{"role": "king", "content": "a"}]]', "prompt 1: message 1 has the role 'king'"),
        ('[[{"role": "assistant", "content": "a"}]]', "the last message is not the user's"),
        ('["\\ud800"]', "prompt 1 is not UTF-8"),
    ],
)
def test_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(PromptError) as error:
        read_prompts("--prompts", str(path))
    assert words in error.value.message and error.value.hint
    assert error.value.message.startswith(f"--prompts {path}")


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('"a"\n\n{"b": \n')
    with pytest.raises(PromptError, match=r"p.jsonl: line 3 is not JSON"):
        read_prompts("--prompts", str(path))
    with pytest.raises(PromptError, match="cannot be read"):
        read_prompts("--prompts", str(tmp_path / "missing"))
