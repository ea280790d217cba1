"""AnswerStream: one answer of the engine as text, thought and figures, while it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from seqmoe_cli.chat.session import Prompt, check_vocabulary
from seqmoe_cli.chat.thinking import TAGS, ThinkSplitter
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
        self._decoder = tokenizer.stream(() if raw else TAGS)
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
