from __future__ import annotations

import pytest

from seqmoe_cli.chat.answer import ThinkSplitter

CASES = [
    ("<think>\nso </ thi\n</think>\n\nHi <think> there", False, "so </ thi\n", "Hi <think> there"),
    ("well</think>\nyes", True, "well", "yes"),
    ("<think>\n\n</think>\n\nHi", False, "", "Hi"),
    (" \n Hi, 1 < 2", False, "", " \n Hi, 1 < 2"),
    ("  <think>a</think>b", False, "a", "b"),
    ("the tag <think>x</think>", False, "", "the tag <think>x</think>"),
    ("<thinking> is a word", False, "", "<thinking> is a word"),
    ("<thi", False, "", "<thi"),
    ("<think>cut </thin", False, "cut </thin", ""),
    ("a</think>b</think>c", True, "a", "b</think>c"),
    ("", False, "", ""),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "inside", "thought", "answer"), CASES)
def test_split(text: str, inside: bool, thought: str, answer: str, size: int) -> None:
    splitter = ThinkSplitter(inside)
    pieces = [splitter.feed(text[i : i + size]) for i in range(0, len(text), size)]
    pieces.append(splitter.finish())
    assert ("".join(t for t, _ in pieces), "".join(a for _, a in pieces)) == (thought, answer)


def test_an_answer_is_not_held_back() -> None:
    splitter = ThinkSplitter()
    assert [splitter.feed(t) for t in ("Hi", " <", " x")] == [("", "Hi"), ("", " <"), ("", " x")]
