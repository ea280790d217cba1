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
from tools.demo_model.sparse.decoder import Decoder, dense_decoder
from tools.demo_model.sparse.delta import read_delta, round_delta
from tools.demo_model.sparse.evaluate import card_answers, expert_load, perplexity
from tools.demo_model.sparse.routing import first_routers
from tools.demo_model.sparse.schedule import Training
from tools.demo_model.sparse.student import Student, new_student, stacked_base
from tools.demo_model.sparse.text import SEED, Batches, Text, gather_text
from tools.demo_model.sparse.writer import Clock
from tools.demo_model.tokenizer import build_tokenizer


def evaluate(
    models: dict[str, Decoder], text: Text, tokenizer: Tokenizer, options: Any
) -> dict[str, Any]:
    """The figures of the model card, of teacher and student."""
    held_out = {"chats": text.held_out_chats, "corpus": text.held_out_corpus}
    found: dict[str, Any] = {"perplexity": {}, "answers": {}}
    for name, model in models.items():
        found["perplexity"][name] = {k: perplexity(model, rows) for k, rows in held_out.items()}
    rows = torch.cat(list(held_out.values()))
    found["load"] = expert_load(models["student"], rows).tolist()
    for name, model in models.items():
        found["answers"][name] = card_answers(model, tokenizer, options.answer_length)
    return found


def shipped(student: Student) -> tuple[dict[str, Tensor], Decoder]:
    """The rounded delta, and the model that it makes."""
    delta = round_delta(student.parameters, student.support)
    parameters, support = read_delta(delta, student.shape.ffn)
    device = student.embedding.device
    rounded = Student(
        student.shape,
        student.embedding,
        student.base,
        {name: tensor.to(device) for name, tensor in parameters.items()},
        support.to(device),
        student.top_k,
    )
    return delta, rounded.decoder()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of training."""
    for name in ("gguf", "corpus", "text", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, kind, value, meaning in (
        ("experts", int, 16, "experts a layer"),
        ("top-k", int, 2, "experts a token"),
        ("width", int, 384, "neurons an expert"),
        ("seconds", float, 480.0, "when training ends, from the start"),
        ("write-seconds", float, 70.0, "for the teacher's conversations"),
        ("write-rows", int, 4096, "conversations written at a time"),
        ("batch-rows", int, 44, "rows a training step"),
        ("length", int, 768, "tokens a row"),
        ("answer-length", int, 320, "tokens an answer may take"),
        ("probe-seconds", float, 18.0, "for the trial of each rate, if there are several"),
        ("distance", float, 0.5, "weight of the residual stream's distance, falling to 0"),
        ("balance", float, 0.02, "weight of the balance loss, mean over layers"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=value, help=f"{meaning} ({value})")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1.0], help="factors on all learning rates to try"
    )
    parser.add_argument("--compile", action="store_true", help="compile the layers")


@dataclass(frozen=True)
class Prepared:
    """What training starts from."""

    tokenizer: Tokenizer
    teacher: Decoder
    base: dict[str, Tensor]
    text: Text
    routers: Tensor

    def student(self, options: Any) -> Student:
        """A new student, the teacher's equal."""
        return new_student(self.teacher, self.base, self.routers, options.top_k)


def prepare(options: Any, clock: Clock) -> Prepared:
    """Read the dense model, gather the text, find the first routers."""
    torch.manual_seed(SEED)
    torch.backends.cuda.enable_cudnn_sdp(False)  # plans anew for every length
    torch._dynamo.config.suppress_errors = True  # what does not compile runs uncompiled
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = read_gguf(options.gguf)
    tokenizer = build_tokenizer(source.tokenizer)
    teacher = dense_decoder(source.config, source.tensors, device, dtype)
    base = stacked_base(source.tensors, teacher.shape.num_layers, device)
    clock.log("read the dense model")
    text = gather_text(teacher, tokenizer, options, clock)
    routers = first_routers(teacher, Batches(text).next(options.batch_rows), options.experts)
    clock.log("found the first routers")
    return Prepared(tokenizer, teacher, base, text, routers)


def best_rate(start: Prepared, options: Any, clock: Clock) -> float:
    """The rate that serves best in a short run of the whole schedule."""
    scores: dict[float, float] = {}
    for rate in options.rates if len(options.rates) > 1 else []:
        clock.log(f"trial of rate {rate}")
        training = Training(start.teacher, start.student(options), options, rate)
        done = training.run(start.text, clock, options.probe_seconds)
        scores[rate] = math.prod(done["ratios"].values())
    return min(scores, key=scores.__getitem__, default=options.rates[0])


def main() -> None:
    """Write delta.safetensors and results.json to the folder `--out`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser)
    options, clock = parser.parse_args(), Clock()
    start = prepare(options, clock)
    rate = best_rate(start, options, clock)
    student = start.student(options)
    training = Training(start.teacher, student, options, rate)
    done = training.run(start.text, clock, options.seconds - clock.seconds())
    delta, model = shipped(student)
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(delta, options.out / "delta.safetensors")
    clock.log("delta saved")
    models = {"teacher": start.teacher, "student": model}
    found = done | {"rate": rate} | evaluate(models, start.text, start.tokenizer, options)
    found["held_out_chats"] = start.text.held_out_chats.tolist()
    (options.out / "results.json").write_text(json.dumps(found, indent=1))
    report(found, clock)


def report(found: dict[str, Any], clock: Clock) -> None:
    """Print the figures and the greedy answers."""
    clock.log(json.dumps(found["perplexity"]))
    for layer, load in enumerate(found["load"]):
        clock.log(f"layer {layer}: load {min(load):.2f} to {max(load):.2f}")
    for i, turns in enumerate(fixed_prompts()):
        print(turns)
        for name, answers in found["answers"].items():
            print(f"  {name}: {answers[0][i]}")
    clock.log("done")


if __name__ == "__main__":
    main()
