"""Session: the exchanges of one conversation and the prompt that follows from them.

It knows no engine: the whole conversation is rendered for every turn, and the engine finds out by
itself how much of it is already in its KV state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from seqmoe_cli.chat.template import ChatTemplate, opens_thinking
from seqmoe_cli.errors import PackedModelError, PromptError
from seqmoe_cli.text.sampling import Setting
from seqmoe_cli.text.tokenizer import Tokenizer

Message = dict[str, str]
"""One message as templates take it: `role` and `content`."""
_TRIAL = [{"role": "user", "content": "?"}]


@dataclass
class ChatOptions:
    """`predict`: most tokens of an answer, None for no limit of its own. `plain`: no status line.
    `stats`: say what an answer cost. `think`: auto, on or off."""

    predict: Setting = field(default_factory=lambda: Setting(None, "default"))
    think: str = "auto"
    hide_thinking: bool = False
    stats: bool = True
    plain: bool = False

    @property
    def max_tokens(self) -> int | None:
        return None if self.predict.value is None else int(self.predict.value)


@dataclass
class Exchange:
    """A message of the user and what the model said to it; a thought is kept but never sent again.
    `stopped`: the user broke the answer off. `num_ctx`: tokens of the context in use after it."""

    user: str
    answer: str = ""
    thought: str = ""
    stopped: bool = False
    num_ctx: int = 0


@dataclass(frozen=True)
class Prompt:
    """A prompt for the engine. `in_thought`: the answer starts inside a thought.
    `num_dropped` exchanges of `dropped_tokens` were left out to make it fit."""

    ids: list[int]
    in_thought: bool = False
    num_dropped: int = 0
    dropped_tokens: int = 0


@dataclass
class Session:
    """A conversation that fits into `ctx_size` tokens by forgetting its oldest exchanges."""

    template: ChatTemplate
    tokenizer: Tokenizer
    ctx_size: int
    system: str = ""
    think: str = "auto"
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def num_ctx(self) -> int:
        """Tokens of the context in use."""
        return self.exchanges[-1].num_ctx if self.exchanges else 0

    def prompt(self, user: str, room: int) -> Prompt:
        """The prompt for a new message of the user, which is not recorded yet.

        Whole oldest exchanges are dropped, for good, until `room` tokens are left for the answer;
        the system prompt stays. Raises `PromptError` if the message alone is too long, and then
        drops nothing.
        """
        whole = prompt = self._render(user, 0)
        count = 0
        while len(prompt.ids) + room > self.ctx_size and count < len(self.exchanges):
            count += 1
            prompt = self._render(user, count)
        check_length(prompt.ids, self.ctx_size)
        del self.exchanges[:count]
        lost = len(whole.ids) - len(prompt.ids)
        return Prompt(prompt.ids, prompt.in_thought, count, lost)

    def undo(self) -> Exchange | None:
        """Take the last exchange out; None when there is none."""
        return self.exchanges.pop() if self.exchanges else None

    def set_think(self, think: str) -> None:
        """Set whether the model thinks; raises `PromptError` when the template cannot do that."""
        render(self.template, self.tokenizer, _TRIAL, self.system, think)
        self.think = think

    def _render(self, user: str, skip: int) -> Prompt:
        messages: list[Message] = []
        for exchange in self.exchanges[skip:]:
            messages.append({"role": "user", "content": exchange.user})
            messages.append({"role": "assistant", "content": exchange.answer})
        messages.append({"role": "user", "content": user})
        return render(self.template, self.tokenizer, messages, self.system, self.think)


def render(
    template: ChatTemplate, tokenizer: Tokenizer, messages: list[Message], system: str, think: str
) -> Prompt:
    """The prompt that asks for an answer to `messages`, `system` (if any) put before them."""
    first = [{"role": "system", "content": system}] if system else []
    text = template.render(first + messages, think)
    return Prompt(tokenizer.encode(text), opens_thinking(text))


def check_length(ids: list[int], ctx_size: int) -> None:
    """Raise `PromptError` unless a prompt leaves room for one token."""
    if len(ids) >= ctx_size:
        raise PromptError(
            f"the prompt has {len(ids):,} tokens, the context holds {ctx_size:,}",
            "shorten it, or raise -c (up to the model's own limit)",
        )


def check_vocabulary(ids: list[int], vocab_size: int) -> None:
    """Raise `PackedModelError` for ids that the model has no embedding for."""
    if ids and max(ids) >= vocab_size:
        raise PackedModelError(
            f"tokenizer.json gives the token id {max(ids)}, but config.json's vocab_size is "
            f"{vocab_size}",
            "the two files are of different models: convert the checkpoint again",
        )
