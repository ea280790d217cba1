"""The text to train on: what the teacher writes, and the corpora."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.sparse.corpus import load_corpus
from tools.demo_model.sparse.decoder import Decoder
from tools.demo_model.sparse.writer import Clock, write_chats

SEED = 1
HELD_OUT_CHATS = 96
CORPUS_SHARE = 0.3  # of a batch's rows


@dataclass(frozen=True)
class Text:
    """Rows of tokens int32 [R, T] to train on, of the teacher and of the corpora, and held out."""

    chats: Tensor
    corpus: Tensor
    held_out_chats: Tensor
    held_out_corpus: Tensor


def gather_text(teacher: Decoder, tokenizer: Tokenizer, options: Any, clock: Clock) -> Text:
    """The text of file `options.text`; if there is none, have it written and put it there."""
    device = teacher.embedding.device
    if options.text.exists():
        saved = torch.load(options.text, map_location=device)
        clock.log("read the text")
        return Text(**saved)
    corpus = load_corpus(options.corpus, tokenizer, options.length, SEED)
    clock.log(f"{corpus.train.numel() / 1e6:.1f} M tokens of corpora")
    chats = write_chats(teacher, tokenizer, corpus.questions, options, clock)
    clock.log(f"{chats.numel() / 1e6:.1f} M tokens of conversations kept")
    held_out = min(HELD_OUT_CHATS, 1 + len(chats) // 4)
    kept = {"corpus": corpus.train.to(device), "held_out_corpus": corpus.held_out.to(device)}
    text = Text(chats=chats[held_out:], held_out_chats=chats[:held_out], **kept)
    torch.save(asdict(text), options.text)
    for row in text.held_out_chats[:4].tolist():
        clock.log(repr(tokenizer.decode(row, skip_special_tokens=False)[75:900]))
    return text


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
