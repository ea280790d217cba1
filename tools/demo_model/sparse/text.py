"""The text to train on: what the teacher writes, and the corpora."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tools.demo_model.sparse.corpus import Corpus
from tools.demo_model.sparse.writer import Clock

HELD_OUT_CHATS = 96


@dataclass(frozen=True)
class Text:
    """Rows of tokens int32 [R, T] to train on, of the teacher and of the corpora, and held out."""

    chats: Tensor
    corpus: Tensor
    held_out_chats: Tensor
    held_out_corpus: Tensor


def gather_text(
    file: Path, corpus: Corpus, write: Callable[[], Tensor], device: torch.device, clock: Clock
) -> Text:
    """The text of a file; if there is none, have the conversations written, by `write`, and put it
    there."""
    if file.exists():
        saved = torch.load(file, map_location=device)
        clock.log("read the text")
        return Text(**saved)
    chats = write().to(device)
    clock.log(f"{chats.numel() / 1e6:.1f} M tokens of conversations kept")
    held_out = min(HELD_OUT_CHATS, 1 + len(chats) // 4)
    kept = {"corpus": corpus.train.to(device), "held_out_corpus": corpus.held_out.to(device)}
    text = Text(chats=chats[held_out:], held_out_chats=chats[:held_out], **kept)
    torch.save(asdict(text), file)
    return text


class Batches:
    """Endless batches of rows: of every source its share, one source behind the other, the rows
    of each in random order."""

    def __init__(self, sources: dict[str, Tensor], shares: dict[str, float]) -> None:
        self._sources, self._shares = dict(sources), shares
        self._left = {name: torch.empty(0).long() for name in sources}

    def replace(self, name: str, rows: Tensor) -> None:
        """Take a source's rows from `rows` from now on."""
        self._sources[name] = rows
        self._left[name] = torch.empty(0).long()

    def next(self, num_rows: int) -> Tensor:
        """Token ids int64 [num_rows, T]."""
        *first, last = self._shares
        numbers = {name: round(num_rows * self._shares[name]) for name in first}
        numbers[last] = num_rows - sum(numbers.values())
        return torch.cat([self._take(name, number) for name, number in numbers.items()]).long()

    def _take(self, name: str, number: int) -> Tensor:
        rows = self._sources[name]
        while len(self._left[name]) < number:
            order = torch.randperm(len(rows), device=rows.device)
            self._left[name] = torch.cat([self._left[name].to(rows.device), order])
        picked, self._left[name] = self._left[name][:number], self._left[name][number:]
        return rows[picked]
