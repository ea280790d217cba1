"""The loop of an interactive chat: read a message, run a command or answer, until told to leave."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO, cast

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.plain_text import PlainTextOutput
from prompt_toolkit.styles import Style

from seqmoe_cli import paths
from seqmoe_cli.chat.chat import Chat
from seqmoe_cli.chat.keyboard import polled_interrupts
from seqmoe_cli.chat.slash import COMMANDS, run_command
from seqmoe_cli.chat.status import idle_line

PROMPT, CONTINUATION = "> ", "  "
BLOCK = '"""'


def run_repl(chat: Chat) -> int:
    """Talk until the user leaves; returns the exit code."""
    session = _prompt_session(chat)
    _greet(chat)
    with polled_interrupts() as interrupts:
        chat.interrupted = interrupts.pressed
        while not chat.leaving:
            try:
                line = session.prompt(PROMPT, handle_sigint=False)
            except KeyboardInterrupt:
                chat.say("Ctrl-D or /exit leaves")
                continue
            except EOFError:
                break
            interrupts.clear()
            _handle(chat, line)
    return 0


def _greet(chat: Chat) -> None:
    engine, plan = chat.engine, chat.engine.plan
    share = f"{plan.num_slots:,} of {engine.config.num_routed_experts:,} experts"
    chat.say(f"{chat.model} on {engine.device}, pool of {share}. /help lists the commands.")
    for line in engine.fallbacks:
        chat.say(line)


def _handle(chat: Chat, line: str) -> None:
    if line.startswith("/"):
        run_command(chat, line)
        return
    text = line.strip()
    if text.startswith(BLOCK):
        text = text.removeprefix(BLOCK).removesuffix(BLOCK).strip("\n")
    if text.strip():
        chat.ask(text)


def _prompt_session(chat: Chat) -> PromptSession[str]:
    names = {name: command.help for command in COMMANDS for name in command.names}

    def toolbar() -> str:
        plan = chat.engine.plan
        return idle_line(chat.session.num_ctx, plan.ctx_size, plan.pool_bytes, chat.console.width)

    dumb = not chat.console.is_terminal
    return PromptSession(
        output=PlainTextOutput(cast(TextIO, chat.console.file)) if dumb else None,
        history=_history(chat.say),
        key_bindings=_key_bindings(),
        multiline=True,
        prompt_continuation=CONTINUATION,
        completer=WordCompleter(list(names), meta_dict=names, sentence=True),
        complete_while_typing=False,
        bottom_toolbar=toolbar if chat.options.stats and not dumb else None,
        reserve_space_for_menu=0 if dumb else 8,
        style=Style.from_dict({"bottom-toolbar": "noreverse"}),
    )


def _key_bindings() -> KeyBindings:
    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.lstrip().startswith(BLOCK) and buffer.text.count(BLOCK) == 1:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    @keys.add("c-j", filter=typing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=typing)
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


def _history(say: Callable[[str], None]) -> History:
    """Lines of earlier chats, in a file that only the user can read."""
    if os.environ.get("SEQMOE_NOHISTORY"):
        return InMemoryHistory()
    path = paths.history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600))
    except OSError as error:
        say(f"no history: {path}: {error.strerror}")
        return InMemoryHistory()
    return FileHistory(str(path))
