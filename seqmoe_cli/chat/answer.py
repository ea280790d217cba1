"""AnswerStream: one answer of the engine as text, thought and figures, while it comes;
ThinkSplitter, which tells the thought that comes first from the answer after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import TYPE_CHECKING

from seqmoe_cli.chat.session import Prompt, check_vocabulary
from seqmoe_cli.chat.template import CLOSE_TAG, OPEN_TAG
from seqmoe_cli.engine.stats import TurnStats
from seqmoe_cli.settings import SamplingParams
from seqmoe_cli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from seqmoe_cli.chat.stream import AnswerView
    from seqmoe_cli.engine.engine import Engine


class AnswerStream:
    """Iterate over it for (thought, answer) pieces; `text`, `thought`, `token_ids` and `stats`
    hold all of it so far, also when the iteration breaks off. `raw` looks for no thought."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, prompt: Prompt, raw: bool = False):
        check_vocabulary(prompt.ids, engine.config.vocab_size)
        self._engine, self._prompt, self._stop_ids = engine, prompt, tokenizer.stop_ids
        self._decoder = tokenizer.stream(() if raw else (OPEN_TAG, CLOSE_TAG))
        self._splitter = None if raw else ThinkSplitter(prompt.in_thought)
        self.text = self.thought = ""
        self.token_ids: list[int] = []
        self.stats = TurnStats(prompt_tokens=len(prompt.ids))

    def run(
        self,
        sampling: SamplingParams,
        max_tokens: int | None,
        view: AnswerView | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[str, str]]:
        """Generate; every piece may be empty on either side. `view` shows the prefill."""
        steps = self._engine.generate(
            self._prompt.ids,
            sampling,
            max_tokens=max_tokens,
            stop_ids=self._stop_ids,
            on_prefill=view.prefill(self.stats.prompt_tokens) if view else None,
            interrupted=interrupted,
        )
        for step in steps:
            self.stats.add(step)
            if step.token_id is not None:
                self.token_ids.append(step.token_id)
                yield self._keep(self._split(self._decoder.push(step.token_id)))
        yield self._keep(self._split(self._decoder.finish()))
        if self._splitter:
            yield self._keep(self._splitter.finish())

    def _split(self, text: str) -> tuple[str, str]:
        return self._splitter.feed(text) if self._splitter else ("", text)

    def _keep(self, piece: tuple[str, str]) -> tuple[str, str]:
        self.thought += piece[0]
        self.text += piece[1]
        return piece


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
