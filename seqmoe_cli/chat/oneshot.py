"""One answer and exit: the answer streams to standard output, or one JSON object comes at the end.

Standard output gets nothing else; thoughts, progress and statistics go to standard error.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from seqmoe_cli.chat import status
from seqmoe_cli.chat.answer import AnswerStream
from seqmoe_cli.chat.keyboard import polled_interrupts
from seqmoe_cli.chat.session import ChatOptions, Prompt
from seqmoe_cli.chat.stream import AnswerView
from seqmoe_cli.engine.stats import FIGURES
from seqmoe_cli.errors import SeqmoeError
from seqmoe_cli.settings import SamplingParams
from seqmoe_cli.terminal.console import is_terminal, make_console, printable
from seqmoe_cli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from seqmoe_cli.engine.engine import Engine

INTERRUPTED = 130


@dataclass(frozen=True)
class OneShot:
    """What is asked of the model of that name. `raw`: no template and no thought in it."""

    model: str
    prompt: Prompt
    sampling: SamplingParams
    options: ChatOptions
    raw: bool = False
    as_json: bool = False


def answer_once(engine: Engine, tokenizer: Tokenizer, request: OneShot) -> int:
    """Answer and return the exit code. Errors of the engine leave as they are, after what was
    begun has been closed off. `OSError` when standard output fails."""
    answer = AnswerStream(engine, tokenizer, request.prompt, request.raw)
    failure: SeqmoeError | None = None
    out = OneShotOutput(sys.stdout)
    with polled_interrupts() as interrupts:
        try:
            with _notes(request) as notes:
                _stream(answer, request, out, notes, interrupts.pressed)
        except SeqmoeError as error:
            failure = error
        begun = bool(answer.token_ids) or answer.stats.finish_reason is not None
        if begun and request.as_json:
            out.line(json.dumps(report(engine, answer, request, failure), ensure_ascii=False))
        elif answer.token_ids or answer.stats.finish_reason == "stop":
            out.line("")
    if failure:
        raise failure
    if request.options.stats:
        print(status.turn_line(answer.stats, not engine.is_warm, 200), file=sys.stderr)
    return INTERRUPTED if answer.stats.finish_reason == "interrupted" else 0


def report(
    engine: Engine, answer: AnswerStream, request: OneShot, failure: SeqmoeError | None = None
) -> dict[str, Any]:
    """The object that --json prints."""
    stats, plan = answer.stats, engine.plan
    verdict = None if engine.prefetch is None else engine.prefetch.switch.verdict
    worth = None if engine.eviction is None else engine.eviction.switch.verdict
    result = {
        "model": request.model,
        "text": answer.text,
        "thinking": answer.thought.strip(),
        "token_ids": answer.token_ids,
        "prompt_tokens": stats.prompt_tokens,
        "prompt_token_ids": request.prompt.ids,
        "completion_tokens": stats.completion_tokens,
        "finish_reason": stats.finish_reason or "interrupted",
        **{figure.key: figure.of(stats) for figure in FIGURES},
        "policy": plan.policy,
        "forecast_trust": None if engine.forecaster is None else engine.forecaster.trust(),
        "eviction_status": engine.eviction.status if engine.eviction else "off",
        "eviction_saved": None if worth is None else worth.saved,
        "prefetch": plan.prefetch,
        "prefetch_by": plan.prefetch_by if engine.prefetch else None,
        "prefetch_status": engine.prefetch.status if engine.prefetch else "off",
        "prefetch_saved": None if verdict is None else verdict.saved,
        "prefetch_copies_per_use": None if verdict is None else verdict.copies_per_use,
        "ctx_size": engine.ctx_size,
        "num_slots": plan.num_slots,
        "warm_start": engine.is_warm,
        "pool_bytes": plan.pool_bytes,
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "verify": engine.pool.stamps is not None,
        "fallbacks": list(engine.fallbacks),
        **asdict(request.sampling),
    }
    return result | ({"error": failure.message} if failure else {})


def _stream(
    answer: AnswerStream,
    request: OneShot,
    out: OneShotOutput,
    notes: AnswerView | None,
    interrupted: Callable[[], bool],
) -> None:
    """Run the answer; notes show the prefill and the thought, until the answer itself begins."""
    max_tokens = request.options.max_tokens
    for thought, text in answer.run(request.sampling, max_tokens, notes, interrupted):
        if notes and thought and not request.options.hide_thinking:
            notes.write(thought, "dim")
        if text and not request.as_json:
            if notes:
                notes.close()
            out.write(text)


@contextlib.contextmanager
def _notes(request: OneShot) -> Iterator[AnswerView | None]:
    """A view on standard error if that is a terminal: logs stay clean."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    live = is_terminal(sys.stderr) and not request.options.plain
    with AnswerView(make_console(sys.stderr), live) as view:
        yield view


class OneShotOutput:
    """Standard output as UTF-8, flushed with every piece; one newline ends the answer, so those
    at its end are held back until more text comes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._newlines = ""
        self._clean = printable if stream.isatty() else str
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")

    def write(self, text: str) -> None:
        text = self._newlines + self._clean(text)
        body = text.rstrip("\n")
        self._newlines = text[len(body) :]
        if body:
            self._stream.write(body)
            self._stream.flush()

    def line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()
