"""The slash commands: one table of name, argument, help and function. Names are exact."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from seqmoe_cli.chat.chat import Chat
from seqmoe_cli.chat.status import eviction_line, figure, worth_line
from seqmoe_cli.chat.template import THINK_CHOICES
from seqmoe_cli.engine.stats import FIGURES, TurnStats
from seqmoe_cli.errors import SeqmoeError, UsageError, either
from seqmoe_cli.settings import check_range
from seqmoe_cli.text.sampling import KNOBS, Setting
from seqmoe_weights.files import readable_size as size

MAX_PREDICT = 10_000_000


@dataclass(frozen=True)
class Command:
    """`argument` is how help shows it; empty means that the command takes none."""

    names: tuple[str, ...]
    argument: str
    help: str
    run: Callable[[Chat, str], None]


def run_command(chat: Chat, line: str) -> None:
    """Do what a line that starts with `/` says; a mistake is explained and changes nothing."""
    name, argument = (*line.split(None, 1), "")[:2]
    command = next((c for c in COMMANDS if name in c.names), None)
    if command is None:
        known = [n for c in COMMANDS for n in c.names]
        near = difflib.get_close_matches(name, known, 1, 0.5)
        chat.say(f"no command {name}" + (f", did you mean {near[0]}?" if near else "; see /help"))
    elif argument.strip() and not command.argument:
        chat.say(f"{name} takes no argument")
    else:
        try:
            command.run(chat, argument.strip())
        except SeqmoeError as error:
            chat.fail(error)


def _help(chat: Chat, argument: str) -> None:
    usages = [f"{', '.join(c.names)} {c.argument}".rstrip() for c in COMMANDS]
    width = max(map(len, usages)) + 2
    lines = [f"{u:{width}}{c.help}" for u, c in zip(usages, COMMANDS, strict=True)]
    lines += [
        "",
        'Enter sends, Alt-Enter or Ctrl-J begins a new line, """ opens and closes a block.',
        "Ctrl-C stops an answer or clears the line, Ctrl-D leaves, Up and Ctrl-R look back.",
        "A message that begins with a slash: put a blank before it.",
    ]
    chat.say("\n".join(lines))


def _exit(chat: Chat, argument: str) -> None:
    chat.leaving = True


def _clear(chat: Chat, argument: str) -> None:
    chat.session.exchanges.clear()
    chat.say("forgot the conversation" + (", kept the system prompt" * bool(chat.session.system)))


def _undo(chat: Chat, argument: str) -> None:
    last = chat.session.undo()
    if last is None:
        chat.say("nothing to undo")
        return
    first_line = last.user.split("\n", 1)[0]
    chat.say(f"took back: {first_line[:60]}{'...' if first_line[60:] else ''}")


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.session.system = "" if argument == '""' else argument
    chat.say(f"system prompt: {chat.session.system or 'none'}")


def _think(chat: Chat, argument: str) -> None:
    if argument:
        if argument not in THINK_CHOICES:
            raise UsageError(f"/think {argument}", f"use {either(THINK_CHOICES)}")
        chat.session.set_think(argument)
    chat.say(f"think: {chat.session.think}")


def _set(chat: Chat, argument: str) -> None:
    name, text = (*argument.split(None, 1), "", "")[:2]
    name = name.removeprefix("--")
    known = [knob.name for knob in KNOBS]
    if name == "system":
        _system(chat, text)
        return
    if name not in (*known, "predict", "n") or not text:
        raise UsageError("/set takes a name and a value", f"names: {', '.join(known)}, predict")
    if name in known:
        chat.sampling.set(name, text)
        value = chat.sampling.text(name)
    else:
        name = "predict"
        chat.options.predict = Setting(_predict(text), "/set")
        value = _predict_text(chat)
    chat.say(f"{name} {value}")


def _predict(text: str) -> int | None:
    if text == "none":
        return None
    number = int(text) if text.isdecimal() else float("nan")
    check_range("/set predict", number, 1, MAX_PREDICT)
    return int(number)


def _predict_text(chat: Chat) -> str:
    tokens = chat.options.max_tokens
    return "none" if tokens is None else str(tokens)


def _show(chat: Chat, argument: str) -> None:
    plan, session = chat.engine.plan, chat.session
    rows = [
        ("model", chat.model, ""),
        ("system", session.system or "none", ""),
        ("think", session.think, ""),
        *chat.sampling.rows(),
        ("predict", _predict_text(chat), chat.options.predict.origin),
        ("context", f"{chat.engine.ctx_size:,} tokens", ""),
        ("pool", f"{plan.num_slots:,} slots, {size(plan.pool_bytes)}", ""),
        ("policy", _policy_text(chat), ""),
        ("prefetch", _prefetch_text(chat), ""),
        ("device", f"{chat.engine.device}, {str(chat.engine.dtype).removeprefix('torch.')}", ""),
    ]
    chat.say("\n".join(f"{n:18}{v:12}{f'  {origin}' if origin else ''}" for n, v, origin in rows))


_STATUS = {
    "on": "",
    "comparing": ", left out for a while to compare",
    "resting": ", resting: it did not pay",
    "stopped": ", stopped",
}


def _policy_text(chat: Chat) -> str:
    eviction = chat.engine.eviction
    return chat.engine.plan.policy + _STATUS[eviction.status if eviction else "on"]


def _prefetch_text(chat: Chat) -> str:
    prefetch = chat.engine.prefetch
    return chat.engine.plan.prefetch + _STATUS[prefetch.status] if prefetch else "off"


def _stats(chat: Chat, argument: str) -> None:
    if not chat.turns:
        chat.say("no answer yet")
        return
    turns = {"last": chat.turns[-1], "all": TurnStats.sum(chat.turns)}
    there = {"", chat.engine.prefetch and "prefetch", chat.engine.eviction and "forecast"}
    table = [
        ("", *turns),
        ("answer", *(f"{turn.completion_tokens:,} tok" for turn in turns.values())),
        ("prompt", *(f"{turn.prompt_tokens:,} tok" for turn in turns.values())),
    ]
    table += [
        (shown.title, *(figure(shown.key, turn) for turn in turns.values()))
        for shown in FIGURES
        if shown.title and shown.needs in there
    ]
    lines = [f"{n:14}{a:>14}{b:>14}" for n, a, b in table]
    verdict = chat.engine.prefetch and chat.engine.prefetch.switch.verdict
    if verdict:
        lines.append(worth_line(verdict.saved, verdict.copies_per_use))
    worth = chat.engine.eviction and chat.engine.eviction.switch.verdict
    if worth:
        lines.append(eviction_line(worth.saved_misses, worth.saved_stall_s, worth.saved))
    if chat.engine.forecaster is not None:
        shares = "/".join(f"{share:.0%}" for share in chat.engine.forecaster.trust())
        lines.append(f"the predictor is trusted {shares} for the steps 1/2/3-4/5-8 ahead")
    chat.say("\n".join(lines))


COMMANDS = (
    Command(("/help",), "", "this list", _help),
    Command(("/exit", "/bye", "/quit"), "", "leave", _exit),
    Command(("/clear",), "", "forget the conversation, keep the system prompt", _clear),
    Command(
        ("/regen",), "", "answer the last message once more", lambda chat, _: chat.regenerate()
    ),
    Command(("/undo",), "", "take the last message and its answer back", _undo),
    Command(("/system",), "[TEXT]", 'show or set the system prompt; "" removes it', _system),
    Command(("/set",), "NAME VALUE", "change a setting; /show lists them", _set),
    Command(("/think",), "[auto|on|off]", "show or set whether the model thinks first", _think),
    Command(("/show",), "", "the settings, and where each comes from", _show),
    Command(("/stats",), "", "what the last answer and all of them cost", _stats),
)
