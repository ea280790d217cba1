"""Measures the sparse model as it is shipped: perplexity on the text held out, and how often each
expert is used. The figures of the teacher and of the first training are the second training's.

    python -m tools.demo_model.sparse.measure --gguf FILE --corpus FOLDER --held-out RESULTS \
        --results RESULTS -o FILE
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from tools.demo_model.source import read_gguf
from tools.demo_model.sparse.build import TOP_K, shipped_delta
from tools.demo_model.sparse.corpus import load_corpus
from tools.demo_model.sparse.decoder import Decoder, dense_decoder
from tools.demo_model.sparse.evaluate import LoadCount, perplexity
from tools.demo_model.sparse.student import delta_student, stacked_base
from tools.demo_model.sparse.train import SEED
from tools.demo_model.tokenizer import build_tokenizer


def shipped_model(gguf: Path, delta: dict[str, Tensor]) -> Decoder:
    """The model that a delta makes of the dense one, in float32 on the CPU."""
    source, cpu = read_gguf(gguf), torch.device("cpu")
    teacher = dense_decoder(source.config, source.tensors, cpu, torch.float32)
    base = stacked_base(source.tensors, teacher.shape.num_layers, cpu)
    with torch.no_grad():
        return delta_student(teacher, base, delta, TOP_K).decoder()


def main() -> None:
    """Write the figures as JSON, for `figures.py`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    for name, meaning in (
        ("gguf", "the dense model"),
        ("corpus", "folder of the corpora"),
        ("held-out", "results.json of the first training"),
        ("results", "results.json of the second training"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, help=meaning)
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    chats = torch.tensor(json.loads(options.held_out.read_text("utf-8"))["held_out_chats"])
    tokenizer = build_tokenizer(read_gguf(options.gguf).tokenizer)
    corpus = load_corpus(options.corpus, tokenizer, chats.shape[1], SEED).held_out
    model = shipped_model(options.gguf, shipped_delta())
    count, student = LoadCount(model), {}
    for kind, rows in (("chats", chats), ("corpus", corpus)):
        student[kind] = perplexity(model, rows, count)
        print(f"{kind}, {len(rows)} rows: {student[kind]:.4f}", flush=True)
    found = json.loads(options.results.read_text("utf-8"))["perplexity"] | {"student": student}
    text = json.dumps({"perplexity": found, "load": count.load().tolist()}, indent=1)
    options.out.write_text(text)


if __name__ == "__main__":
    main()
