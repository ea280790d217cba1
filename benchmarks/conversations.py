"""Random conversations with a chat, checked after every move: history, KV state, screen and graph
must agree, and at random moments a fresh engine must say the same."""

from __future__ import annotations

import io
import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.agreement import COMPARED_TOKENS, Comparison, WatchedEngine, require
from seqmoe_cli.chat.chat import Chat
from seqmoe_cli.chat.session import ChatOptions, Message, Session, render
from seqmoe_cli.chat.slash import run_command
from seqmoe_cli.chat.template import ChatTemplate
from seqmoe_cli.engine.decoding import GraphSteps
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.terminal.console import make_console, printable
from seqmoe_cli.text.files import shipped_text
from seqmoe_cli.text.sampling import SamplingSettings
from seqmoe_cli.text.tokenizer import Tokenizer

KNOBS = {
    "temp": ("0", "0.3", "0.8", "1.5"),
    "top-k": ("0", "5", "40"),
    "top-p": ("0.5", "0.95", "1"),
    "min-p": ("0", "0.05"),
    "repeat-penalty": ("1", "1.1", "1.5"),
    "presence-penalty": ("0", "0.5"),
    "frequency-penalty": ("0", "0.5"),
    "seed": ("random", "1", "2"),
}


class Said(NamedTuple):
    """An exchange, as the history must have it."""

    user: str
    answer: str


class Conversations:
    """A chat on `engine` and moves of a user, drawn from `seed`. `reference` is another engine of
    the same model. `counts` says how often each move was made."""

    def __init__(self, model: Path, engine: WatchedEngine, reference: Engine, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine, self.comparison = engine, Comparison(engine, reference)
        self.tokenizer = Tokenizer.open(model)
        self.screen = io.StringIO()
        self.session = Session(ChatTemplate.open(model), self.tokenizer, engine.ctx_size)
        settings = SamplingSettings({}, {})
        console = make_console(self.screen)
        self.chat = Chat(model.name, console, engine, self.session, settings, ChatOptions())
        self.history: list[Said] = []
        self.num_moves = 0
        self.counts: Counter[str] = Counter()
        self._text = self.tokenizer.encode(shipped_text()[0])
        self._graph: torch.cuda.CUDAGraph | None = None
        self._moves: dict[Callable[[], None], float] = {
            self.talk: 8,
            self.regenerate: 2,
            self.undo: 1.5,
            self.leave: 1,
            self.change_settings: 2,
            self.change_system: 0.3,
            self.clear: 0.3,
            self.empty_pool: 0.5,
            self.paste: 0.8,
            self.paste_too_much: 0.2,
            self.fill_context: 0.3,
            self.compare_continued: 1.5,
            self.compare_fresh: 0.5,
        }

    def move(self) -> None:
        """Make one move and check everything. Raises `Violation`."""
        (move,) = self.random.choices(list(self._moves), list(self._moves.values()))
        move()
        self.num_moves += 1
        self.counts[move.__name__] += 1
        self._check_graph()

    def touch_everything(self) -> None:
        """Use all of both contexts once, so that their memory is there."""
        whole = self._text[: self.engine.ctx_size]
        for engine in (self.engine, self.comparison.reference):
            engine.log_likelihoods(whole)

    # --- moves ---

    def talk(self) -> None:
        self._set("predict", str(self.random.randint(1, 48)))
        self._turn(self._message(self.random.randint(1, 60)))

    def regenerate(self) -> None:
        self._set("predict", str(self.random.randint(1, 48)))
        if self.history:
            last = self.history.pop()
            self._turn(last.user, last)

    def undo(self) -> None:
        self._command("/undo")
        del self.history[-1:]

    def leave(self) -> None:
        """Close the stream of an answer before its end."""
        prompt = self._expected_prompt("Go on.", 0)
        if len(prompt) < self.engine.ctx_size:
            held, number = list(self.engine.token_ids), self.random.randint(0, 20)
            stream = self.engine.generate(prompt, self.chat.sampling.params)
            for _ in itertools.islice(stream, number):
                pass
            stream.close()
            if number:
                self._check_state()
            else:  # a stream that was not begun
                require(self.engine.token_ids == held, "a stream changed the state unasked")

    def change_settings(self) -> None:
        for name in self.random.sample(list(KNOBS), 3):
            self._set(name, self.random.choice(KNOBS[name]))

    def change_system(self) -> None:
        self._command(f"/system {self.random.choice(('Be brief.', 'Tell fables.', chr(34) * 2))}")

    def clear(self) -> None:
        self._command("/clear")
        self.history.clear()

    def empty_pool(self) -> None:
        self.engine.reset_pool()

    def paste(self) -> None:
        """A long message: makes the conversation forget its oldest exchanges sooner or later."""
        self._set("predict", str(self.random.randint(1, 16)))
        self._turn(self._message(self.engine.ctx_size // self.random.randint(2, 6)))

    def paste_too_much(self) -> None:
        self._turn(self._message(self.engine.ctx_size + 10))
        require(self.engine.asked is None, "a message longer than the context was answered")

    def fill_context(self) -> None:
        """An answer that only a stop token or the end of the context ends."""
        self._set("predict", "none")
        self._turn(self._message(self.engine.ctx_size * 7 // 8), interruptible=False)

    def compare_continued(self) -> None:
        self.comparison.continued(self._question())

    def compare_fresh(self) -> None:
        self.comparison.fresh(self._question())

    # --- how ---

    def _message(self, num_tokens: int) -> str:
        start = self.random.randrange(len(self._text) - num_tokens)
        return self.tokenizer.decode(self._text[start : start + num_tokens]).strip() or "?"

    def _command(self, line: str) -> None:
        run_command(self.chat, line)

    def _set(self, name: str, value: str) -> None:
        self._command(f"/set {name} {value}")

    def _turn(self, user: str, replaced: Said | None = None, interruptible: bool = True) -> None:
        """Ask, or regenerate when an exchange is replaced; one answer in four is interrupted."""
        self.chat.interrupted = lambda: False
        if interruptible and self.random.random() < 0.25:
            polls = itertools.count()
            limit = self.random.randrange(2 * self.engine.config.num_hidden_layers + 30)
            self.chat.interrupted = lambda: next(polls) >= limit
        self.engine.asked, self.engine.given = None, ()
        self.screen.seek(0)
        self.screen.truncate()
        if replaced:
            self.chat.regenerate()
        else:
            self.chat.ask(user)
        self._check_turn(user, replaced)

    def _question(self) -> list[int]:
        """A prompt that leaves room for a comparison, and that the history does not keep."""
        user = self._message(self.random.randint(1, 30))
        room = self.engine.ctx_size - COMPARED_TOKENS
        skip = (n for n in itertools.count() if len(self._expected_prompt(user, n)) < room)
        return self._expected_prompt(user, next(skip))

    def _expected_prompt(self, user: str, skip: int) -> list[int]:
        messages: list[Message] = []
        for said in self.history[skip:]:
            messages.append({"role": "user", "content": said.user})
            messages.append({"role": "assistant", "content": said.answer})
        messages.append({"role": "user", "content": user})
        session = self.session
        return render(session.template, self.tokenizer, messages, session.system, session.think).ids

    # --- checks ---

    def _check_turn(self, user: str, replaced: Said | None) -> None:
        engine = self.engine
        if engine.asked is None:
            self.counts["refused"] += 1
            require("the prompt has" in self.screen.getvalue(), "refused without a word")
            said, dropped = replaced, 0
        else:
            self._check_state()
            self.counts[f"ended by {engine.ended}"] += 1
            answer = self.tokenizer.decode(list(engine.given))
            shown, wanted = _words(self.screen.getvalue()), _words(printable(answer))
            require(wanted in shown, f"not on the screen: {answer!r}")
            began = bool(engine.given) or engine.ended != "interrupted"
            said = Said(user, answer) if began else replaced
            dropped = len(self.history) + (said is not None) - len(self.session.exchanges)
            require(dropped >= 0, "an exchange that was not made")
            require(
                engine.asked == self._expected_prompt(user, dropped),
                "the prompt is not that of the history",
            )
        self.counts["dropped exchanges"] += dropped
        self.history = self.history[dropped:] + ([said] if said else [])
        found = [Said(e.user, e.answer) for e in self.session.exchanges]
        require(found == self.history, f"the history is {found}, not {self.history}")
        if said and said != replaced:
            require(self.session.num_ctx == len(engine.asked) + len(engine.given), "wrong num_ctx")

    def _check_state(self) -> None:
        """The KV state holds what was said, all but at most the last token."""
        engine = self.engine
        said = [*(engine.asked or ()), *engine.given]
        held = engine.token_ids
        self.counts["tokens"] += len(engine.given)
        require(held == said[: len(held)], "the KV state holds what was not said")
        if engine.given:
            require(len(held) >= len(said) - 1, f"the KV state holds {len(held)} of {len(said)}")

    def _check_graph(self) -> None:
        issue = self.engine.decoding.issue
        graph = issue.graph if isinstance(issue, GraphSteps) else None
        require(self._graph in (None, graph), "the graph was captured again")
        self._graph = graph


def _words(text: str) -> str:
    """Without blanks: a terminal has no tabs."""
    return "".join(text.split())
