"""Interview: answers many prompts as a chat would, while a recorder watches the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from seqmoe_cli.chat.answer import AnswerStream
from seqmoe_cli.chat.prompt import Conversation
from seqmoe_cli.chat.session import Message, Prompt, check_length, render
from seqmoe_cli.chat.template import ChatTemplate
from seqmoe_cli.errors import PromptError
from seqmoe_cli.settings import SamplingParams
from seqmoe_cli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from seqmoe_cli.engine.engine import Engine
    from seqmoe_cli.forecast.recorder import TraceRecorder


@dataclass(frozen=True)
class Interview:
    """How prompts are answered. Answer number i, from 0, has the seed `sampling.seed + i`."""

    template: ChatTemplate
    tokenizer: Tokenizer
    sampling: SamplingParams
    ctx_size: int
    think: str = "auto"
    max_tokens: int | None = None

    def check(self, conversations: Sequence[Conversation]) -> None:
        """Raise `PromptError`, before a model is loaded, for a first turn that cannot be asked."""
        for conversation in conversations:
            self._prompt(conversation, [*conversation.said, _user(conversation.turns[0])])

    def record(
        self,
        engine: Engine,
        recorder: TraceRecorder,
        conversations: Sequence[Conversation],
        tell: Callable[[str], None],
    ) -> None:
        """Answer every turn from an empty KV state, so that each token of its prompt is evaluated
        and seen. Raises `PromptError` when a conversation grows out of the context."""
        engine.record(recorder)
        for n, conversation in enumerate(conversations, 1):
            messages = list(conversation.said)
            for turn in conversation.turns:
                messages.append(_user(turn))
                prompt = self._prompt(conversation, messages)
                answer = AnswerStream(engine, self.tokenizer, prompt)
                sampling = replace(
                    self.sampling, seed=(self.sampling.seed or 0) + recorder.num_sequences
                )
                engine.reset_kv()
                recorder.begin(len(prompt.ids))
                for _ in answer.run(sampling, self.max_tokens):
                    tell(f"prompt {n:,} of {len(conversations):,}: {recorder.num_tokens:,} tokens")
                messages.append({"role": "assistant", "content": answer.text})
        engine.record(None)

    def _prompt(self, conversation: Conversation, messages: list[Message]) -> Prompt:
        try:
            prompt = render(self.template, self.tokenizer, messages, "", self.think)
            check_length(prompt.ids, self.ctx_size)
        except PromptError as error:
            raise PromptError(f"{conversation.name}: {error.message}", error.hint) from error
        return prompt


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
