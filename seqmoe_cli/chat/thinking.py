"""Splits a stream of text into the thought that comes first and the answer after it."""

from __future__ import annotations

from enum import Enum, auto

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
TAGS = (OPEN_TAG, CLOSE_TAG)


class _State(Enum):
    START = auto()  # undecided: nothing but blanks or the beginning of a tag so far
    THOUGHT = auto()
    GAP = auto()  # blanks between the thought and the answer
    ANSWER = auto()


class ThinkSplitter:
    """Feed it text as it comes; it gives the new parts of (thought, answer), without the tags.

    A thought can only be the first thing, so a tag that an answer talks about stays in it. What
    may become a tag is held back until it is decided. `inside`: the prompt opened the thought.
    """

    def __init__(self, inside: bool = False) -> None:
        self._state = _State.THOUGHT if inside else _State.START
        self._held = ""
        self._any_thought = False

    def feed(self, text: str) -> tuple[str, str]:
        """The new parts of the thought and of the answer."""
        self._held += text
        thought = ""
        if self._state is _State.START:
            self._decide()
        if self._state is _State.THOUGHT:
            thought = self._take_thought()
        if self._state is _State.GAP:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.ANSWER
        return thought, self._release() if self._state is _State.ANSWER else ""

    def finish(self) -> tuple[str, str]:
        """What was held back when the stream ended."""
        rest = self._release()
        return (rest, "") if self._state is _State.THOUGHT else ("", rest)

    def _decide(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN_TAG):
            self._held = text[len(OPEN_TAG) :]
            self._state = _State.THOUGHT
        elif not OPEN_TAG.startswith(text):
            self._state = _State.ANSWER

    def _take_thought(self) -> str:
        if not self._any_thought:
            self._held = self._held.lstrip()
        thought, tag, rest = self._held.partition(CLOSE_TAG)
        if tag:
            self._state = _State.GAP
        else:
            keep = next(n for n in range(len(CLOSE_TAG), -1, -1) if thought.endswith(CLOSE_TAG[:n]))
            cut = len(thought) - keep
            thought, rest = thought[:cut], thought[cut:]
        self._held = rest
        self._any_thought = self._any_thought or bool(thought)
        return thought

    def _release(self) -> str:
        text, self._held = self._held, ""
        return text
