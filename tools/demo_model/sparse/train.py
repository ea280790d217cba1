"""Makes the sparse model out of the dense one, within a time limit, on one GPU.

The teacher writes conversations; the student starts as the teacher's equal and is trained to
keep its next-token distribution while its experts give up neurons. Everything is evaluated as it
is shipped: from the rounded delta.

    python -m tools.demo_model.sparse.train --gguf FILE --corpus FOLDER --text FILE --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.source import read_gguf
from tools.demo_model.sparse.chat import fixed_prompts
from tools.demo_model.sparse.corpus import Corpus, load_corpus
from tools.demo_model.sparse.decoder import Decoder, dense_decoder
from tools.demo_model.sparse.delta import round_delta
from tools.demo_model.sparse.evaluate import Interview, expert_load, perplexity
from tools.demo_model.sparse.routing import first_routers
from tools.demo_model.sparse.schedule import Training
from tools.demo_model.sparse.student import delta_student, new_student, stacked_base
from tools.demo_model.sparse.text import Batches, Text, gather_text
from tools.demo_model.sparse.writer import Clock, Pen, Writer, without_kept_prompts, write_chats
from tools.demo_model.tokenizer import build_tokenizer

SEED = 1
SHARES = {"chats": 0.7, "corpus": 0.3}  # of a batch's rows
CARD_TEMPERATURES = (0.0, 0.2)  # greedy, and what generation_config.json advises


@dataclass(frozen=True)
class Prepared:
    """What training starts from: the dense model as the teacher, and the text."""

    tokenizer: Tokenizer
    teacher: Decoder
    base: dict[str, Tensor]
    corpus: Corpus
    text: Text


def prepare(options: Any, clock: Clock, seed: int, pen: Pen) -> Prepared:
    """Read the dense model; gather the text, the teacher's part of it with `pen`."""
    torch.manual_seed(seed)
    torch.backends.cuda.enable_cudnn_sdp(False)  # plans anew for every length
    torch._dynamo.config.suppress_errors = True  # what does not compile runs uncompiled
    torch._dynamo.config.recompile_limit = 64  # batches of several sizes, two models
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = read_gguf(options.gguf)
    tokenizer = build_tokenizer(source.tokenizer)
    teacher = dense_decoder(source.config, source.tensors, device, dtype)
    base = stacked_base(source.tensors, teacher.shape.num_layers, device)
    clock.log("read the dense model")
    corpus = load_corpus(options.corpus, tokenizer, options.length, SEED)
    clock.log(f"{corpus.train.numel() / 1e6:.1f} M tokens of corpora")

    def write() -> Tensor:
        writer = Writer(tokenizer, corpus.questions, pen, seed)
        rows = write_chats(teacher, writer, options, clock)
        torch.cuda.empty_cache()  # the KV state took half of the memory
        return without_kept_prompts(rows, tokenizer)

    text = gather_text(options.text, corpus, write, device, clock)
    for row in text.held_out_chats[:4].tolist():
        clock.log(repr(tokenizer.decode(row, skip_special_tokens=False)[75:900]))
    return Prepared(tokenizer, teacher, base, corpus, text)


def perplexities(models: dict[str, Decoder], text: Text) -> dict[str, dict[str, float]]:
    """Of each model on each of the texts held out."""
    held_out = {"chats": text.held_out_chats, "corpus": text.held_out_corpus}
    return {
        name: {kind: perplexity(model, rows) for kind, rows in held_out.items()}
        for name, model in models.items()
    }


def load(model: Decoder, text: Text) -> list[list[float]]:
    """How often each expert is used on the text held out, over how often it would be by turns."""
    found: list[list[float]] = expert_load(
        model, torch.cat([text.held_out_chats, text.held_out_corpus])
    ).tolist()
    return found


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """The options of both trainings."""
    for name in ("gguf", "corpus", "text", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--compile", action="store_true", help="compile the layers")


def add_numbers(parser: argparse.ArgumentParser, *numbers: tuple[str, Any, str]) -> None:
    """Options with defaults: name, default, meaning."""
    for name, value, meaning in numbers:
        parser.add_argument(
            f"--{name}", type=type(value), default=value, help=f"{meaning} ({value})"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this training."""
    add_common_options(parser)
    add_numbers(
        parser,
        ("experts", 16, "experts a layer"),
        ("top-k", 2, "experts a token"),
        ("width", 384, "neurons an expert"),
        ("seconds", 480.0, "when training ends, from the start"),
        ("write-seconds", 70.0, "for the teacher's conversations"),
        ("write-rows", 4096, "conversations written at a time"),
        ("batch-rows", 44, "rows a training step"),
        ("length", 768, "tokens a row"),
        ("answer-length", 320, "tokens an answer may take"),
        ("probe-seconds", 18.0, "for the trial of each rate, if there are several"),
        ("distance", 0.5, "weight of the residual stream's distance, falling to 0"),
        ("balance", 0.02, "weight of the balance loss, mean over layers"),
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1.0], help="factors on all learning rates to try"
    )


class FirstTraining:
    """The first training, once for each rate to try and once in full."""

    def __init__(self, start: Prepared, options: Any, clock: Clock) -> None:
        self._start, self._options, self._clock = start, options, clock
        self.batches = Batches({"chats": start.text.chats, "corpus": start.text.corpus}, SHARES)
        rows = self.batches.next(options.batch_rows)
        self._routers = first_routers(start.teacher, rows, options.experts)
        clock.log("found the first routers")

    def run(self, rate: float, seconds: float) -> tuple[Any, dict[str, Any]]:
        """Train a new student; the student and what was done."""
        start, options = self._start, self._options
        student = new_student(start.teacher, start.base, self._routers, options.top_k)
        training = Training(start.teacher, student, options, rate, self._clock, seconds)
        return student, training.run(self.batches, start.text)

    def best_rate(self) -> float:
        """The rate that serves best in a short run of the whole schedule."""
        rates: list[float] = self._options.rates
        scores: dict[float, float] = {}
        for rate in rates if len(rates) > 1 else []:
            self._clock.log(f"trial of rate {rate}")
            _, done = self.run(rate, self._options.probe_seconds)
            scores[rate] = math.prod(done["ratios"].values())
        return min(scores, key=scores.__getitem__, default=rates[0])


def main() -> None:
    """Write delta.safetensors and results.json to the folder `--out`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser)
    options, clock = parser.parse_args(), Clock()
    pen = Pen(0.3, 1.0, 1.0, 0.4, 0.0, options.length, options.compile)
    start = prepare(options, clock, SEED, pen)
    training = FirstTraining(start, options, clock)
    rate = training.best_rate()
    student, done = training.run(rate, options.seconds - clock.seconds())
    delta = round_delta(student.parameters, student.support)
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(delta, options.out / "delta.safetensors")
    clock.log("delta saved")
    with torch.no_grad():
        model = delta_student(start.teacher, start.base, delta, options.top_k).decoder()
    models = {"teacher": start.teacher, "student": model}
    interview = Interview(start.tokenizer, options.answer_length, options.compile)
    found = done | {
        "rate": rate,
        "perplexity": perplexities(models, start.text),
        "load": load(model, start.text),
        "answers": {
            name: [interview(each, fixed_prompts(), warmth) for warmth in CARD_TEMPERATURES]
            for name, each in models.items()
        },
        "held_out_chats": start.text.held_out_chats.tolist(),
    }
    (options.out / "results.json").write_text(json.dumps(found, indent=1))
    report(found, clock)


def report(found: dict[str, Any], clock: Clock) -> None:
    """Print the figures and the greedy answers to the fixed prompts."""
    clock.log(json.dumps(found["perplexity"]))
    for layer, uses in enumerate(found["load"]):
        clock.log(f"layer {layer}: load {min(uses):.2f} to {max(uses):.2f}")
    for i, turns in enumerate(fixed_prompts()):
        print(turns)
        for name, answers in found["answers"].items():
            print(f"  {name}: {answers[0][i]}")
    clock.log("done")


if __name__ == "__main__":
    main()
