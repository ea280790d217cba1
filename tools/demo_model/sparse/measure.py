"""Measures the sparse model as it is shipped, and its teacher: perplexity on the text held out, and
how often each expert is used. Both in float32 on a CPU, some ten minutes.

    python -m tools.demo_model.sparse.measure --gguf FILE --corpus FOLDER -o FILE
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from tools.demo_model.source import DenseModel, read_gguf
from tools.demo_model.sparse.build import TOP_K, shipped_delta
from tools.demo_model.sparse.corpus import load_corpus
from tools.demo_model.sparse.decoder import Decoder, dense_decoder
from tools.demo_model.sparse.evaluate import LoadCount, held_out_chats, perplexity
from tools.demo_model.sparse.student import delta_student, stacked_base
from tools.demo_model.sparse.train import SEED
from tools.demo_model.tokenizer import build_tokenizer


def both_models(source: DenseModel, delta: dict[str, Tensor]) -> tuple[Decoder, Decoder]:
    """The dense model, and the one that a delta makes of it."""
    cpu = torch.device("cpu")
    teacher = dense_decoder(source.config, source.tensors, cpu, torch.float32)
    base = stacked_base(source.tensors, teacher.shape.num_layers, cpu)
    with torch.no_grad():
        return teacher, delta_student(teacher, base, delta, TOP_K).decoder()


def main() -> None:
    """Write the figures as JSON, for `figures.py`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--gguf", type=Path, required=True, help="the dense model")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the corpora")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    source, chats = read_gguf(options.gguf), held_out_chats()
    tokenizer = build_tokenizer(source.tokenizer)
    corpus = load_corpus(options.corpus, tokenizer, chats.shape[1], SEED).held_out
    teacher, student = both_models(source, shipped_delta())
    count = LoadCount(student)
    found: dict[str, dict[str, float]] = {"teacher": {}, "student": {}}
    for kind, rows in (("chats", chats), ("corpus", corpus)):
        found["teacher"][kind] = perplexity(teacher, rows)
        found["student"][kind] = perplexity(student, rows, count)
        print(f"{kind}, {len(rows)} rows: {found}", flush=True)
    text = json.dumps({"perplexity": found, "load": count.load().tolist()}, indent=1)
    options.out.write_text(text)


if __name__ == "__main__":
    main()
