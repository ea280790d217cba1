"""The clean corpora as rows of tokens, and the questions in them."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.sparse.chat import render

END = "<|endoftext|>"
CHATS = ("fairytaleqa", "gsm8k", "personalitychat")
HELD_OUT_STORYBOOKS = 60  # the last ones
HELD_OUT_CLASSICS = ("A Kidnapped Santa Claus", "The Man Who Would Be King")
UNSURE_CLASSICS = ("Stand for Mars", "The Boxcar Children")  # not surely in the public domain
MAX_QUESTION_CHARS = 700


@dataclass(frozen=True)
class Corpus:
    """Rows of token ids int64 [R, T]: `train` in an order by chance, `held_out`; and `questions`,
    user turns for the teacher to answer."""

    train: Tensor
    held_out: Tensor
    questions: list[str]


def load_corpus(folder: Path, tokenizer: Tokenizer, length: int, seed: int) -> Corpus:
    """Read the corpora in `folder` and cut them into rows of `length` tokens."""
    books = _documents(folder / "storybooks_ccby.txt.xz")
    classics = _documents(folder / "classics_children_pd.txt.xz")
    tales = [
        *_documents(folder / "fairytaleqa_stories.txt.xz"),
        *_documents(folder / "aesop_fables_pd.txt.xz"),
    ]
    chats, questions = _chats(folder)
    held_out = books[-HELD_OUT_STORYBOOKS:] + [
        d for d in classics if _title(d) in HELD_OUT_CLASSICS
    ]
    skipped = HELD_OUT_CLASSICS + UNSURE_CLASSICS
    kept = [d for d in classics if _title(d) not in skipped]
    texts = books[:-HELD_OUT_STORYBOOKS] + tales + kept + chats
    rows = _rows(tokenizer, texts, length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return Corpus(rows[order], _rows(tokenizer, held_out, length), questions)


def _documents(path: Path) -> list[str]:
    text = lzma.decompress(path.read_bytes()).decode("utf-8")
    return [part.strip() for part in text.split(END) if part.strip()]


def _title(document: str) -> str:
    return document.partition("\n")[0]


def _chats(folder: Path) -> tuple[list[str], list[str]]:
    """Chats in the template, and the user turns that open them."""
    rendered, questions = [], []
    for name in CHATS:
        lines = lzma.decompress((folder / f"{name}_chat.jsonl.xz").read_bytes()).decode("utf-8")
        for line in lines.splitlines():
            turns = [(m["role"], m["content"]) for m in json.loads(line)["messages"]]
            rendered.append(render(turns))
            questions.append(turns[0][1])
    return rendered, [q for q in questions if len(q) <= MAX_QUESTION_CHARS]


def _rows(tokenizer: Tokenizer, texts: Iterable[str], length: int) -> Tensor:
    """Texts one behind the other, each followed by END, cut into rows; the rest is dropped."""
    encoded = tokenizer.encode_batch_fast([text + END for text in texts])
    stream = torch.cat([torch.tensor(e.ids, dtype=torch.int32) for e in encoded])
    return stream[: len(stream) // length * length].view(-1, length).long()
