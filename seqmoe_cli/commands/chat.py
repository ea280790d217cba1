"""`seqmoe chat`: flags -> prompt -> engine -> one answer or the interactive loop."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from seqmoe_cli.commands import options
from seqmoe_cli.commands.options import flag
from seqmoe_cli.errors import SeqmoeError, UsageError
from seqmoe_cli.settings import EngineOptions
from seqmoe_cli.terminal.console import make_console
from seqmoe_cli.terminal.progress import note

if TYPE_CHECKING:
    from pathlib import Path

    from seqmoe_cli.chat.prompt import Question
    from seqmoe_cli.chat.session import ChatOptions, Prompt
    from seqmoe_cli.engine.engine import Engine
    from seqmoe_cli.text.sampling import Value


_Text = str | None
_PromptFlag = Annotated[_Text, flag("-p", "--prompt TEXT", help="Answer TEXT and exit.")]
_FileFlag = Annotated[
    _Text, flag("-f", "--file FILE", help="Answer a text file and exit; - is stdin.")
]
_MessagesFlag = Annotated[
    _Text, flag("--messages FILE", help="Answer a JSON list of role and content; - is stdin.")
]
_RawFlag = Annotated[bool, flag("--raw", help="Continue the text itself, without a template.")]
_JsonFlag = Annotated[bool, flag("--json", help="Print the answer as one JSON object.")]
_SystemFlag = Annotated[_Text, flag("-s", "--system TEXT", help="System prompt.")]
_SystemFileFlag = Annotated[_Text, flag("--system-file FILE", help="File with the system prompt.")]
_HideFlag = Annotated[bool, flag("--hide-thinking", help="Do not show thoughts.")]
_StatsFlag = Annotated[
    bool | None, flag("--stats/--no-stats", help="Figures after an answer; on in a chat, else off.")
]
_ProfileFlag = Annotated[
    bool,
    flag(
        "--profile/--no-profile",
        help="Begin with the experts that earlier answers used most, and learn from these.",
    ),
]
_PlainFlag = Annotated[bool, flag("--plain", help="No status line; text as it comes.")]


@options.grouped
def chat(
    model: options.ModelArgument,
    prompt: _PromptFlag = None,
    file: _FileFlag = None,
    messages: _MessagesFlag = None,
    raw: _RawFlag = False,
    as_json: _JsonFlag = False,
    system: _SystemFlag = None,
    system_file: _SystemFileFlag = None,
    predict: options.PredictOption = None,
    ctx_size: options.CtxOption = options.DEFAULTS.ctx_size,
    sampling: options.SamplingFlags = options.SAMPLING,
    think: options.ThinkOption = "auto",
    hide_thinking: _HideFlag = False,
    place: options.PlaceFlags = options.PLACE,
    experts: options.PoolFlags = options.EXPERTS,
    verify: options.VerifyOption = options.DEFAULTS.verify,
    profile: _ProfileFlag = True,
    stats: _StatsFlag = None,
    plain: _PlainFlag = False,
) -> int:
    """Chat with MODEL, or answer once: to -p, -f, --messages or piped text.

    Sampling settings that are not given come from the model's generation_config.json.
    """
    from seqmoe_cli.chat.prompt import Sources, read_question
    from seqmoe_cli.chat.session import ChatOptions
    from seqmoe_cli.chat.template import THINK_CHOICES
    from seqmoe_cli.text.sampling import Setting

    knobs = sampling.checked()
    options.check_prefetch_by(experts.prefetch_by, [experts.prefetch])
    engine = place.options(ctx_size=ctx_size, verify=verify, **vars(experts))
    sources = Sources(prompt, file, messages, raw, system, system_file)
    options.check_predict(predict)
    options.check_choice("--think", think, THINK_CHOICES)
    question = read_question(sources)
    most = Setting(predict, "default" if predict is None else "flag")
    said = question.is_open if stats is None else stats
    behaviour = ChatOptions(most, think, hide_thinking, said, plain)
    if question.is_open and (as_json or not sys.stdout.isatty()):
        why = "--json answers once" if as_json else "standard output is not a terminal"
        raise UsageError(f"there is no prompt, and {why}", "give -p TEXT or -f FILE")
    launch = _Launch(options.find_model(model), engine, knobs, behaviour, profile)
    return launch.talk(question) if question.is_open else launch.answer(question, as_json)


class _Launch:
    """Everything that is known and checked before the weights are loaded."""

    def __init__(
        self,
        folder: Path,
        engine: EngineOptions,
        sampling: Mapping[str, Value],
        behaviour: ChatOptions,
        profile: bool,
    ) -> None:
        from seqmoe_cli.forecast.profile import UseProfile
        from seqmoe_cli.text.sampling import SamplingSettings, checkpoint_settings
        from seqmoe_cli.text.tokenizer import Tokenizer
        from seqmoe_weights.packed import PackedModel

        packed = PackedModel.open(folder)
        config = packed.config
        self.profile = UseProfile.of(packed) if profile else None
        self.model = folder.resolve().name
        self.folder, self.engine, self.behaviour = folder, engine, behaviour
        self.ctx_size = min(engine.ctx_size, config.max_position_embeddings)
        self.tokenizer = Tokenizer.open(folder)
        self.sampling = SamplingSettings(sampling, checkpoint_settings(folder))

    def answer(self, question: Question, as_json: bool) -> int:
        """Answer once; the exit code."""
        from seqmoe_cli.chat.oneshot import OneShot, answer_once
        from seqmoe_cli.chat.session import check_length

        prompt = self._prompt(question)
        check_length(prompt.ids, self.ctx_size)
        params = self.sampling.params
        if params.seed is None:  # so that --json can say which one it was
            params = replace(params, seed=secrets.randbits(32))
        request = OneShot(
            self.model, prompt, params, self.behaviour, question.raw is not None, as_json
        )
        with self._opened_engine() as engine:
            note(*engine.fallbacks)
            code = answer_once(engine, self.tokenizer, request)
            self._learn(engine)
            return code

    def talk(self, question: Question) -> int:
        """Talk until the user leaves; the exit code."""
        from seqmoe_cli.chat.chat import Chat
        from seqmoe_cli.chat.keyboard import quiet_terminal
        from seqmoe_cli.chat.repl import run_repl
        from seqmoe_cli.chat.session import Session
        from seqmoe_cli.chat.template import ChatTemplate

        session = Session(
            ChatTemplate.open(self.folder), self.tokenizer, self.ctx_size, question.system
        )
        session.set_think(self.behaviour.think)
        with quiet_terminal(), self._opened_engine() as engine:
            console = make_console(sys.stdout)
            chat = Chat(self.model, console, engine, session, self.sampling, self.behaviour)
            chat.learn = self._learn
            return run_repl(chat)

    @contextmanager
    def _opened_engine(self) -> Iterator[Engine]:
        """The engine, its pool filled with what the profile says; what is learned is kept."""
        with options.opened_engine(self.folder, self.engine) as engine:
            if self.profile is not None:
                engine.warm(self.profile.ranking().tolist())
            try:
                yield engine
            finally:
                if self.profile is not None:
                    with suppress(SeqmoeError):  # nothing depends on it
                        self.profile.save()

    def _learn(self, engine: Engine) -> None:
        if self.profile is not None:
            self.profile.add(engine.used_in_answer())

    def _prompt(self, question: Question) -> Prompt:
        from seqmoe_cli.chat.session import Prompt, render
        from seqmoe_cli.chat.template import ChatTemplate

        if question.raw is not None:
            return Prompt(self.tokenizer.encode(question.raw))
        return render(
            ChatTemplate.open(self.folder),
            self.tokenizer,
            list(question.messages),
            question.system,
            self.behaviour.think,
        )
