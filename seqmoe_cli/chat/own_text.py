"""OwnText: a model talks to itself, and the routing of what it said is recorded.

Conversations are written step by step, the user's turns too, and then evaluated once more as a
whole with a recorder watching, which is quick: prompts are evaluated many tokens at a time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING

from seqmoe_cli.chat.answer import AnswerStream
from seqmoe_cli.chat.session import Message, Prompt, render
from seqmoe_cli.chat.template import ChatTemplate
from seqmoe_cli.errors import PromptError
from seqmoe_cli.forecast.trace import Trace
from seqmoe_cli.settings import SamplingParams
from seqmoe_cli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from seqmoe_cli.engine.engine import Engine
    from seqmoe_cli.forecast.recorder import TraceRecorder

_MARK = "\x02here\x03"  # stands for what a user is about to write
_USER_TOKENS = 64
_CURIOUS = SamplingParams(temperature=1.0, top_k=0, top_p=0.95, min_p=0.02)
_LEAST_ANSWER = 16  # tokens for which there must be room
_MOST_SILENT = 50  # conversations
_FREE = 0.5  # share of first turns that are left to the model


@dataclass(frozen=True)
class Written:
    """A conversation as token ids, and which of them are answers: first and last + 1 of each."""

    ids: list[int]
    answers: list[tuple[int, int]]


@dataclass
class OwnText:
    """Conversations of `exchanges` questions and answers, the latter of at most `answer_tokens`."""

    engine: Engine
    template: ChatTemplate
    tokenizer: Tokenizer
    sampling: SamplingParams
    answer_tokens: int = 384
    exchanges: int = 2
    think: str = "auto"

    def trace(
        self, recorder: TraceRecorder, num_tokens: int, seed: int, tell: Callable[[int], None]
    ) -> Trace:
        """Write and record until `recorder` has that many tokens; `tell` hears how many it has. The
        same seed gives the same trace. Raises `PromptError` when the model has nothing to say."""
        chance, answers = random.Random(seed), []
        questions, silent = Questions(seed), 0
        while recorder.num_tokens < num_tokens:
            written = self.write(chance, questions, lambda: tell(recorder.num_tokens))
            silent = 0 if written.answers else silent + 1
            if silent > _MOST_SILENT:
                raise PromptError(
                    f"{silent} conversations in a row had no answer",
                    "raise -c, or record answers to prompts of your own: seqmoe trace",
                )
            if written.answers:
                self.record(recorder, written.ids)
                answers.append(written.answers)
                tell(recorder.num_tokens)
        return recorder.trace().with_answers(answers)

    def write(
        self, chance: random.Random, questions: Questions, tell: Callable[[], None]
    ) -> Written:
        """One conversation. It ends early when the context is full or nothing is said."""
        messages: list[Message] = []
        ids: list[int] = []
        answers: list[tuple[int, list[int]]] = []  # where each begins
        for number in range(self.exchanges):
            free = number > 0 or chance.random() < _FREE
            asked = self._question(messages, chance) if free else questions.next()
            messages.append({"role": "user", "content": asked})
            prompt = render(self.template, self.tokenizer, messages, "", self.think)
            most = min(self.answer_tokens, self.engine.ctx_size - len(prompt.ids))
            if not asked or most < _LEAST_ANSWER:
                break
            answer = self._say(prompt, self.sampling, most, chance, tell)
            if not answer.text.strip():
                break
            ids = prompt.ids + answer.token_ids
            answers.append((len(prompt.ids), answer.token_ids))
            messages.append({"role": "assistant", "content": answer.text})
        # A template may render an earlier answer in another way than it was generated, for example
        # without its thoughts; then it was not decoded like this.
        spans = [
            (first, first + len(said))
            for first, said in answers
            if ids[first : first + len(said)] == said
        ]
        return Written(ids, spans)

    def record(self, recorder: TraceRecorder, ids: list[int]) -> None:
        """Evaluate a conversation in one go while the recorder watches."""
        recorder.begin(len(ids))
        self.engine.record(recorder)
        self.engine.log_likelihoods(ids)
        self.engine.record(None)

    def _question(self, messages: list[Message], chance: random.Random) -> str:
        """What a user might say next, as the model sees it; empty when it has nothing to say."""
        text = self.template.render([*messages, {"role": "user", "content": _MARK}], self.think)
        before, found, _ = text.partition(_MARK)
        if not found:
            raise PromptError(
                "the chat template changes what a user says", "record a trace, and give --trace"
            )
        prompt = Prompt(self.tokenizer.encode(before))
        if len(prompt.ids) + _USER_TOKENS >= self.engine.ctx_size:
            return ""
        return self._say(prompt, _CURIOUS, _USER_TOKENS, chance, lambda: None).text.strip()

    def _say(
        self, prompt: Prompt, sampling: SamplingParams, most: int, chance: random.Random,
        tell: Callable[[], None],
    ) -> AnswerStream:  # fmt: skip
        answer = AnswerStream(self.engine, self.tokenizer, prompt)
        sampling = replace(sampling, seed=chance.getrandbits(32))
        for _ in answer.run(sampling, most):
            tell()
        return answer


class Questions:
    """Everyday questions: templates filled with topics, in an order of their own for each seed."""

    def __init__(self, seed: int) -> None:
        path = files("seqmoe_cli").joinpath("data", "questions.json")
        content = json.loads(path.read_text("utf-8"))
        self._all = [
            t.replace("{}", topic) for t in content["asked"] for topic in content["topics"]
        ]
        random.Random(seed).shuffle(self._all)
        self._number = -1

    def next(self) -> str:
        self._number += 1
        return str(self._all[self._number % len(self._all)])
