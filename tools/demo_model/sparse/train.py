"""Makes the sparse model out of the dense one, within a time limit, on one GPU.

The teacher writes conversations; the student starts as the teacher's equal and is trained to
keep its next-token distribution while its experts give up neurons. Everything is evaluated as it
is shipped: from the rounded delta.

    python -m tools.demo_model.sparse.train --gguf FILE --corpus FOLDER --out FOLDER
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
from tools.demo_model.sparse.corpus import load_corpus
from tools.demo_model.sparse.decoder import Decoder, dense_decoder
from tools.demo_model.sparse.delta import read_delta, round_delta
from tools.demo_model.sparse.distill import Distiller, Losses, Weights
from tools.demo_model.sparse.evaluate import card_answers, expert_load, perplexity
from tools.demo_model.sparse.routing import first_routers, prune, saliency
from tools.demo_model.sparse.student import Student, new_student, stacked_base
from tools.demo_model.sparse.writer import Clock, write_chats
from tools.demo_model.tokenizer import build_tokenizer

SEED = 1
HELD_OUT_CHATS = 96
CORPUS_SHARE = 0.3
RATES = {"low-rank": 2e-3, "norm": 1e-3, "router": 2e-3, "scale": 5e-3}
WARM_UP, PRUNED_AT = 0.02, 0.35  # shares of the training time
PRUNE_EVERY, REPORT_EVERY = 10, 50  # steps


@dataclass(frozen=True)
class Text:
    """Rows of tokens [R, T] to train on, from the teacher and from the corpora, and held out."""

    chats: Tensor
    corpus: Tensor
    held_out_chats: Tensor
    held_out_corpus: Tensor


class Batches:
    """Endless batches of rows, some of the teacher's and some of the corpora, in random order."""

    def __init__(self, text: Text) -> None:
        self._sources = {"chats": text.chats, "corpus": text.corpus}
        self._left: dict[str, Tensor] = {name: torch.empty(0).long() for name in self._sources}

    def next(self, num_rows: int) -> Tensor:
        """Token ids int64 [num_rows, T]."""
        num_corpus = round(num_rows * CORPUS_SHARE)
        parts = (self._take("chats", num_rows - num_corpus), self._take("corpus", num_corpus))
        return torch.cat(parts).long()

    def _take(self, name: str, number: int) -> Tensor:
        rows = self._sources[name]
        while len(self._left[name]) < number:
            order = torch.randperm(len(rows), device=rows.device)
            self._left[name] = torch.cat([self._left[name].to(rows.device), order])
        picked, self._left[name] = self._left[name][:number], self._left[name][number:]
        return rows[picked]


class Training:
    """The schedule: learning rates, width of the experts and weights of the losses over time."""

    def __init__(self, teacher: Decoder, student: Student, options: Any) -> None:
        self.teacher, self.student, self.options = teacher, student, options
        self._distiller = Distiller(teacher, student, options.compile)
        p = student.parameters
        groups = {
            "low-rank": [t for name, t in p.items() if name[-2:] in (".a", ".b")],
            "norm": [t for name, t in p.items() if name.endswith("norm")],
            "router": [p["router"]],
            "scale": [p["scale"]],
        }
        self._optimizer = torch.optim.AdamW(
            [{"params": groups[name], "lr": 0.0, "name": name} for name in groups],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=teacher.embedding.is_cuda,
        )

    def run(self, text: Text, clock: Clock, seconds: float) -> None:
        """Train for `seconds`."""
        begun, batches, num_rows = clock.seconds(), Batches(text), self.options.batch_rows
        step, width, tokens = 0, self.teacher.shape.ffn, 0
        while (share := (clock.seconds() - begun) / seconds) < 1:
            if step % PRUNE_EVERY == 0 and width > self.options.width:
                width = self.width(share)
                found = saliency(self.student.decoder(), batches.next(num_rows // 2 + 1))
                prune(self.student, found, width)
            rows = batches.next(num_rows)
            try:
                losses, length = self.step(rows, share)
            except torch.OutOfMemoryError:
                num_rows //= 2
                self._optimizer.zero_grad()
                clock.log(f"out of memory: on with {num_rows} rows a step")
                continue
            step, tokens = step + 1, tokens + rows.numel()
            if step % REPORT_EVERY == 0 or step in (1, 5):
                figures = " ".join(f"{k} {v:.4f}" for k, v in losses._asdict().items())
                clock.log(
                    f"step {step} {share:.2f} {tokens / 1e6:.1f} M tokens, width {width}, "
                    f"{figures}, gradient {length:.3f}"
                )
            if step % (8 * REPORT_EVERY) == 0:
                clock.log(self.ratios(text))

    def width(self, share: float) -> int:
        """Neurons an expert holds at a share of the time: all of them, then ever fewer."""
        full, final = self.teacher.shape.ffn, int(self.options.width)
        left = max(0.0, 1 - share / PRUNED_AT)
        return int(final + (full - final) * left**3)

    def step(self, rows: Tensor, share: float) -> tuple[Losses, float]:
        """One optimizer step; also the length of the gradient, before it is clipped."""
        rate = min(1.0, share / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * share))
        for group in self._optimizer.param_groups:
            group["lr"] = RATES[group["name"]] * self.options.rate * rate
        weights = Weights(self.options.distance * (1 - share), self.options.balance)
        losses = self._distiller.backward(rows, weights)
        length = torch.nn.utils.clip_grad_norm_(self.student.parameters.values(), 1.0).item()
        if math.isfinite(length):
            self._optimizer.step()
        self._optimizer.zero_grad()
        return losses, length

    def ratios(self, text: Text) -> str:
        """Perplexities on a little of the held-out text, the student's over the teacher's."""
        model, few = self.student.decoder(), slice(0, 24)
        shown = []
        for name, rows in (("chats", text.held_out_chats), ("corpus", text.held_out_corpus)):
            ours, theirs = perplexity(model, rows[few]), perplexity(self.teacher, rows[few])
            shown.append(f"{name} {ours:.3f}/{theirs:.3f} = {ours / theirs:.3f}")
        return "held out: " + ", ".join(shown)


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


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("gguf", "corpus", "out"):
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
        ("answer-length", int, 512, "tokens a prompt and its answer may take"),
        ("rate", float, 1.0, "factor on all learning rates"),
        ("distance", float, 0.5, "weight of the residual stream's distance, falling to 0"),
        ("balance", float, 0.02, "weight of the balance loss"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=value, help=f"{meaning} ({value})")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    return parser.parse_args()


def main() -> None:
    """Write delta.safetensors and results.json to the folder `--out`."""
    options, clock = read_options(), Clock()
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = read_gguf(options.gguf)
    tokenizer = build_tokenizer(source.tokenizer)
    teacher = dense_decoder(source.config, source.tensors, device, dtype)
    clock.log("read the dense model")
    corpus = load_corpus(options.corpus, tokenizer, options.length, SEED)
    clock.log(f"{corpus.train.numel() / 1e6:.1f} M tokens of corpora")
    chats = write_chats(teacher, tokenizer, corpus.questions, options, clock)
    held_out = min(HELD_OUT_CHATS, len(chats) // 4)
    text = Text(
        chats[held_out:],
        corpus.train.to(device),
        chats[:held_out].long(),
        corpus.held_out.to(device),
    )
    for row in text.held_out_chats[:3].tolist():
        clock.log(repr(tokenizer.decode(row, skip_special_tokens=False)[:900]))
    routers = first_routers(teacher, Batches(text).next(options.batch_rows), options.experts)
    base = stacked_base(source.tensors, teacher.shape.num_layers, device)
    student = new_student(teacher, base, routers, options.top_k)
    training = Training(teacher, student, options)
    training.run(text, clock, options.seconds - clock.seconds())
    delta, model = shipped(student)
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(delta, options.out / "delta.safetensors")
    clock.log("delta saved")
    found = evaluate({"teacher": teacher, "student": model}, text, tokenizer, options)
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
