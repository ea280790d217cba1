"""The second training: the sparse model learns to end its answers, within a time limit, on one GPU.

The student of `delta.safetensors` writes conversations itself and is pulled, on them, on the
teacher's and on the corpora, to the teacher's next-token distribution with the corrections of
`corrections.py`. Only what `delta.is_healed` names is trained and written.

    python -m tools.demo_model.sparse.heal --gguf FILE --corpus FOLDER --text FILE --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.demo_model.sparse.build import DELTA, TOP_K
from tools.demo_model.sparse.chat import check_prompts, fixed_prompts
from tools.demo_model.sparse.corrections import Marks
from tools.demo_model.sparse.decoder import Decoder
from tools.demo_model.sparse.delta import is_healed, round_delta
from tools.demo_model.sparse.evaluate import Interview, ended, held_out_chats
from tools.demo_model.sparse.schedule import Corrected, Training
from tools.demo_model.sparse.student import delta_student, healing_student
from tools.demo_model.sparse.text import Batches
from tools.demo_model.sparse.train import (
    Prepared,
    add_common_options,
    add_numbers,
    load,
    perplexities,
    prepare,
    report,
)
from tools.demo_model.sparse.writer import Clock, Pen, Writer, without_kept_prompts

SEED = 2
SHARES = {"own": 0.35, "chats": 0.4, "corpus": 0.25}  # of a batch's rows
AGAIN = 0.25  # of the conversations, at most: earlier ones taken up
TEMPERATURE, TIMES = 0.2, 3  # of the check's answers, and how often each prompt is asked


class Healing:
    """The rounds of the second training: the student writes, then learns."""

    def __init__(self, start: Prepared, options: Any, clock: Clock) -> None:
        self.start, self.options, self.clock = start, options, clock
        self.delta = load_file(options.delta)
        self._student = healing_student(start.teacher, start.base, self.delta, TOP_K, options.rank)
        options.width = self.delta["neurons"].shape[-1]
        pen = Pen(0.0, 0.7, options.penalty, 0.15, AGAIN, options.length, options.compile)
        self._writer = Writer(start.tokenizer, start.corpus.questions, pen, SEED + 1)
        sources = {"own": start.text.chats, "chats": start.text.chats, "corpus": start.text.corpus}
        self._batches = Batches(sources, SHARES)

    def run(self) -> dict[str, Any]:
        """Train until the time is up, the file being saved at the end of each round; what was
        done."""
        start, options = self.start, self.options
        corrected = Corrected(Marks.of(start.tokenizer), SHARES["own"] + SHARES["chats"])
        seconds = options.seconds - self.clock.seconds()
        training = Training(
            start.teacher, self._student, options, options.rate, self.clock, seconds, corrected
        )
        done: dict[str, Any] = {}
        for number in range(1, options.rounds + 1):
            self._batches.replace("own", self._write())
            done = training.run(self._batches, start.text, number / options.rounds)
            save(options.out / "healing.safetensors", self.healing())
        return done

    def _write(self) -> Tensor:
        with torch.no_grad():
            model = self._student.decoder()
        rows = self._writer.write(model, self.options.own_rows)
        rows = without_kept_prompts(rows, self.start.tokenizer)
        self.clock.log(f"{len(rows)} conversations written by the student")
        text = self.start.tokenizer.decode(rows[0].tolist(), skip_special_tokens=False)
        self.clock.log(repr(text[75:900]))
        return rows

    def healing(self) -> dict[str, Tensor]:
        """What is to be shipped of the student, rounded."""
        rounded = round_delta(self._student.parameters, self._student.support)
        return {name: tensor for name, tensor in rounded.items() if is_healed(name)}

    def model(self, healing: dict[str, Tensor]) -> Decoder:
        """The model that the delta makes with a healing."""
        student = delta_student(self.start.teacher, self.start.base, self.delta | healing, TOP_K)
        with torch.no_grad():
            return student.decoder()


def check(name: str, model: Decoder, interview: Interview, clock: Clock) -> dict[str, Any]:
    """The share of answers to the check's prompts that end, and a list of the fixed prompts'
    answers."""
    fixed = fixed_prompts()
    asked = fixed + check_prompts() * TIMES
    answers = interview(model, asked, TEMPERATURE)
    share = ended(answers[len(fixed) :])
    clock.log(f"answers that end, {name}: {share:.3f}")
    return {"ended": share, "answers": [answers[: len(fixed)]]}


def save(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file at once. If the process is stopped meanwhile, the old file stays."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file.with_suffix(".part"))
    os.replace(file.with_suffix(".part"), file)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this training."""
    add_common_options(parser)
    parser.add_argument("--delta", type=Path, default=DELTA, help="the first training's")
    add_numbers(
        parser,
        ("seconds", 430.0, "when training ends, from the start"),
        ("rounds", 6, "times that the student writes and learns"),
        ("rank", 56, "of the low-rank changes of attention"),
        ("rate", 1.0, "factor on all learning rates"),
        ("write-seconds", 50.0, "for the teacher's conversations"),
        ("write-rows", 4096, "conversations the teacher writes at a time"),
        ("own-rows", 2048, "conversations the student writes a round"),
        ("penalty", 1.05, "repetition penalty of what is written"),
        ("batch-rows", 44, "rows a training step"),
        ("length", 768, "tokens a row"),
        ("answer-length", 500, "tokens an answer may take"),
        ("balance", 0.05, "weight of the balance loss, mean over layers"),
    )
    parser.set_defaults(distance=0.0)


def main() -> None:
    """Write healing.safetensors and results.json to the folder `--out`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser)
    options, clock = parser.parse_args(), Clock()
    pen = Pen(0.2, 1.0, options.penalty, 0.25, AGAIN, options.length, options.compile)
    start = prepare(options, clock, SEED, pen)
    chats = held_out_chats().to(start.text.held_out_chats)
    start = replace(start, text=replace(start.text, held_out_chats=chats))
    results = options.out / "results.json"
    healing = Healing(start, options, clock)
    interview = Interview(start.tokenizer, options.answer_length, options.compile)
    models = {"teacher": start.teacher, "before": healing.model({})}
    found: dict[str, Any] = {"perplexity": perplexities(models, start.text)}
    clock.log(json.dumps(found["perplexity"]))
    found["checks"] = {"before": check("before", models["before"], interview, clock)}
    torch.cuda.empty_cache()
    found |= healing.run()
    models["student"] = healing.model(healing.healing())
    found["perplexity"] |= perplexities({"student": models["student"]}, start.text)
    found["load"] = load(models["student"], start.text)
    write_json(results, found)
    for name in ("student", "teacher"):
        found["checks"][name] = check(name, models[name], interview, clock)
        write_json(results, found)
    report(found | {"answers": {k: c["answers"] for k, c in found["checks"].items()}}, clock)


def write_json(file: Path, found: dict[str, Any]) -> None:
    """Write results as JSON."""
    file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
