"""Chat: answers messages on a console, keeps the session, and says what happened.

It is what slash commands act on; where the lines come from is not its business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.console import Console

from seqmoe_cli.chat import status
from seqmoe_cli.chat.answer import AnswerStream
from seqmoe_cli.chat.session import ChatOptions, Exchange, Prompt, Session
from seqmoe_cli.chat.stream import AnswerView
from seqmoe_cli.engine.stats import TurnStats
from seqmoe_cli.errors import PoolError, SeqmoeError
from seqmoe_cli.settings import SamplingParams
from seqmoe_cli.text.sampling import SamplingSettings

if TYPE_CHECKING:
    from seqmoe_cli.engine.engine import Engine

NOTICE_STYLE = THOUGHT_STYLE = "dim"


@dataclass
class Chat:
    """A conversation on `console`; `interrupted` is polled while an answer comes. `model` is its
    name; `learn` is called after every answer."""

    model: str
    console: Console
    engine: Engine
    session: Session
    sampling: SamplingSettings
    options: ChatOptions
    interrupted: Callable[[], bool] = lambda: False
    learn: Callable[[Engine], None] = lambda engine: None
    turns: list[TurnStats] = field(default_factory=list)
    leaving: bool = False
    _num_regens: int = 0

    def say(self, text: str) -> None:
        """Print a notice."""
        self.console.print(text, style=NOTICE_STYLE)

    def fail(self, error: SeqmoeError) -> None:
        """Print an error; the chat goes on. Not after a `PoolError`, which is raised again: nothing
        that the engine would say now could be trusted."""
        if isinstance(error, PoolError):
            raise error
        self.say(error.message + (f"\n  {error.hint}" if error.hint else ""))

    def ask(self, user: str) -> None:
        """Answer a message and record the exchange."""
        self._num_regens = 0
        self._turn(user, None)

    def regenerate(self) -> None:
        """Answer the last message once more; the old answer stays if no new one begins."""
        last = self.session.undo()
        if last is None:
            self.say("nothing to answer again")
            return
        self._num_regens += 1
        self._turn(last.user, last)

    def _turn(self, user: str, replaced: Exchange | None) -> None:
        exchange = None
        try:
            prompt = self.session.prompt(user, self._room())
            if prompt.num_dropped:
                plural = "" if prompt.num_dropped == 1 else "s"
                self.say(
                    f"dropped {prompt.num_dropped} earlier exchange{plural} "
                    f"({prompt.dropped_tokens:,} tokens)"
                )
            exchange = self._answer(user, prompt)
        except SeqmoeError as error:
            self.fail(error)
        exchange = exchange or replaced
        if exchange is not None:
            self.session.exchanges.append(exchange)

    def _answer(self, user: str, prompt: Prompt) -> Exchange | None:
        """Show the answer; None when it was stopped before it began."""
        answer = AnswerStream(self.engine, self.session.tokenizer, prompt)
        cold = not self.turns and not self.engine.is_warm
        live = self.console.is_terminal and not self.options.plain
        with AnswerView(self.console, live) as view:
            self._show(answer, view)
        self.turns.append(answer.stats)
        self.learn(self.engine)
        self._after(answer.stats, cold)
        stopped = answer.stats.finish_reason == "interrupted"
        if stopped and not answer.token_ids:
            self.say("stopped before the answer began; the message was taken back")
            return None
        num_ctx = len(prompt.ids) + len(answer.token_ids)
        return Exchange(user, answer.text, answer.thought.strip(), stopped, num_ctx)

    def _show(self, answer: AnswerStream, view: AnswerView) -> None:
        in_thought, max_tokens = False, self.options.max_tokens
        for thought, text in answer.run(self._params(), max_tokens, view, self.interrupted):
            hidden = self.options.hide_thinking and not answer.text and bool(answer.thought)
            line = status.live_line(
                answer.stats,
                self.engine.ctx_size,
                self.engine.plan.pool_bytes,
                view.width,
                hidden,
                self.engine.prefetch.status if self.engine.prefetch else "",
                self.engine.eviction.status if self.engine.eviction else "",
            )
            if thought and not self.options.hide_thinking:
                view.write(thought, THOUGHT_STYLE, line)
                in_thought = True
            if text and in_thought:
                view.end_paragraph()
                in_thought = False
            view.write(text, "", line)

    def _after(self, stats: TurnStats, cold: bool) -> None:
        """What is said under an answer."""
        if stats.finish_reason == "interrupted" and stats.completion_tokens:
            self.say("[stopped]")
        elif stats.finish_reason == "length":
            full = stats.completion_tokens != self.options.max_tokens
            limit = f"-c {self.engine.ctx_size}" if full else f"-n {self.options.max_tokens}"
            self.say(f"[stopped at {limit}]")
        if self.options.stats and stats.completion_tokens:
            self.say(status.turn_line(stats, cold, self.console.width))

    def _room(self) -> int:
        """Tokens to keep free for an answer: a quarter of the context, or what -n asks for."""
        quarter = self.engine.ctx_size // 4
        return max(1, min(quarter, self.options.max_tokens or quarter))

    def _params(self) -> SamplingParams:
        """A fixed seed moves on with every /regen, which would repeat the answer otherwise."""
        params = self.sampling.params
        if params.seed is None:
            return params
        return replace(params, seed=(params.seed + self._num_regens) % 2**63)
