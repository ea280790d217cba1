"""Tokenizer: text <-> token ids from a model folder's tokenizer.json, and which ids end an answer.

Adds no special token by itself; those come from a chat template only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import tokenizers

from seqmoe_cli.errors import CheckpointError, PackedModelError
from seqmoe_cli.text.files import COPY_HINT, read_json_object

_REPLACEMENT = "\ufffd"


class Tokenizer:
    """The tokenizer of one model. `stop_ids` holds every id that ends an answer."""

    def __init__(self, backend: tokenizers.Tokenizer, stop_ids: Collection[int] = ()) -> None:
        self.backend = backend
        self.stop_ids = frozenset(stop_ids)
        added = backend.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}

    @classmethod
    def open(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and the end-of-text ids of generation_config.json and config.json.

        Raises `PackedModelError` for a missing file, `CheckpointError` for a malformed one.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise PackedModelError(f"{path} is missing", "convert the checkpoint again")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise CheckpointError(f"{path} cannot be read: {error}", COPY_HINT) from error
        backend.no_truncation()
        backend.no_padding()
        stop_ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            stop_ids |= _eos_ids(folder / name)
        return cls(backend, stop_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone; special tokens written out in it are recognised as Hugging Face's
        tokenizers do."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def stream(self, keep: Collection[str] = ()) -> TextStream:
        """A decoder of one answer; special tokens named in `keep` are not left out."""
        return TextStream(self, {i: t for i, t in self._special.items() if t in keep})


class TextStream:
    """Turns ids into text one at a time, holding back bytes that do not make a character yet.

    Decodes a window of the last ids that gave text and those that did not give any so far: a
    decoder may treat the start of a text specially, so an id cannot be decoded alone.
    """

    # `tokenizers.DecodeStream` does the same, but raises where a tokenizer that falls back to bytes
    # meets invalid ones, and has no way to give what it holds back at the end.

    def __init__(self, tokenizer: Tokenizer, kept: dict[int, str]) -> None:
        self._decode = tokenizer.decode
        self._kept = kept
        self._before: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty when it completes none. Bytes that cannot
        become a character show as U+FFFD once a later id proves it."""
        if token_id in self._kept:
            return self._kept[token_id]
        self._pending.append(token_id)
        return self._complete(is_last=False)

    def finish(self) -> str:
        """What was held back, when no more ids come: bytes that make no character show as U+FFFD,
        so that all pieces together are the text of all ids."""
        return self._complete(is_last=True)

    def _complete(self, is_last: bool) -> str:
        before, text = self._decode(self._before), self._decode(self._before + self._pending)
        if text.endswith(_REPLACEMENT) and not is_last:
            return ""
        # Text already given can change only by invalid bytes; what is new is then shown alone.
        new = text[len(before) :] if text.startswith(before) else self._decode(self._pending)
        if new:
            self._before, self._pending = self._pending, []
        return new


def _eos_ids(path: Path) -> set[int]:
    value = read_json_object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if not isinstance(item, int) or isinstance(item, bool):
            raise CheckpointError(
                f"{path}: eos_token_id is {value!r}", "it must be a token id or a list of them"
            )
    return set(ids)
