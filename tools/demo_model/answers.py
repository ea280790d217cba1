"""What two models answer to the fixed prompts, side by side and unedited, in Markdown.

python -m tools.demo_model.answers SPARSE DENSE: folders of packed models. Both sample with the
settings of SPARSE, so that only the weights differ.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from seqmoe_cli.chat.answer import AnswerStream
from seqmoe_cli.chat.prompt import read_prompts
from seqmoe_cli.chat.session import Message, render
from seqmoe_cli.chat.template import ChatTemplate
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.stats import TurnStats
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_cli.text.sampling import SamplingSettings, checkpoint_settings
from seqmoe_cli.text.tokenizer import Tokenizer

PROMPTS = Path(__file__).parent / "sparse" / "prompts.json"
MAX_TOKENS = 500
POOL = "45%"
SEED = 0


@dataclass(frozen=True)
class Answer:
    """One answer; `ended` says whether the model ended it by itself."""

    question: str
    text: str
    num_tokens: int
    ended: bool
    hit_rate: float


def main(argv: list[str]) -> int:
    """Print the page; the exit code."""
    if len(argv) != 2:
        print("usage: python -m tools.demo_model.answers SPARSE DENSE", file=sys.stderr)
        return 2
    sampling = SamplingSettings({"seed": SEED}, checkpoint_settings(Path(argv[0]))).params
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawn) as processes:
        sparse, dense = processes.map(interview, argv, (POOL, "all"), [sampling] * 2)
    print("\n".join(page(sparse, dense)))
    return 0


def interview(folder: str, pool: str, sampling: SamplingParams) -> list[list[Answer]]:
    """The answers of a model, on the CPU: one list for each conversation."""
    path = Path(folder)
    template, tokenizer = ChatTemplate.open(path), Tokenizer.open(path)
    options = EngineOptions(PoolSize.parse(pool), device="cpu", ctx_size=2048)
    engine = Engine.open(path, options)
    conversations = []
    for conversation in read_prompts("PROMPTS", str(PROMPTS)):
        messages: list[Message] = []
        answers = []
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn})
            prompt = render(template, tokenizer, messages, "", "auto")
            stream = AnswerStream(engine, tokenizer, prompt)
            for _ in stream.run(sampling, MAX_TOKENS, None, lambda: False):
                pass
            messages.append({"role": "assistant", "content": stream.text})
            answers.append(_answer(turn, stream.text, stream.stats))
        conversations.append(answers)
    engine.close()
    return conversations


def _answer(question: str, text: str, stats: TurnStats) -> Answer:
    ended = stats.finish_reason == "stop"
    return Answer(question, text, stats.completion_tokens, ended, stats.decode.hit_rate)


def page(sparse: list[list[Answer]], dense: list[list[Answer]]) -> Iterator[str]:
    """The lines of the Markdown page."""
    for name, model in (("sparse", sparse), ("dense", dense)):
        answers = [answer for conversation in model for answer in conversation]
        tokens = sum(answer.num_tokens for answer in answers)
        cut = sum(not answer.ended for answer in answers)
        yield (
            f"- The {name} model: {len(answers)} answers, {tokens:,} tokens, {cut} cut "
            f"at {MAX_TOKENS} tokens."
        )
    rates = [a.hit_rate for c in sparse for a in c]
    yield (
        f"- Hit rate of the sparse model's answers in a pool of {POOL}: "
        f"{100 * min(rates):.1f} % to {100 * max(rates):.1f} %."
    )
    for number, (ours, theirs) in enumerate(zip(sparse, dense, strict=True), 1):
        for turn, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            label = f"{number}" if turn == 0 else f"{number}, turn {turn + 1}"
            yield from ("", f"### {label}: {our.question}")
            yield from ("", f"Sparse{_note(our)}:", "", *_quote(our.text))
            yield from ("", f"Dense{_note(their)}:", "", *_quote(their.text))


def _note(answer: Answer) -> str:
    return "" if answer.ended else f" (cut at {MAX_TOKENS} tokens)"


def _quote(text: str) -> Iterator[str]:
    """The text as it is; two spaces keep its line breaks in Markdown."""
    lines = text.strip().split("\n")
    return (f"> {line}  " if line else ">" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
