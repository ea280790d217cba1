from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from seqmoe_cli.errors import CheckpointError, PackedModelError
from seqmoe_cli.text.tokenizer import Tokenizer

TEXTS = ["hello there", "naïve 😀 日本語 👩‍👩‍👧\n", "  two  blanks\t\n\n", "é" * 5, ""]


def _byte_fallback() -> Tokenizer:
    """A tokenizer of the SentencePiece kind: bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["\u2581", "\u2581the", "\u2581cat", "a", "b", "\u65e5"]
    model = models.BPE(
        vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"
    )
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Sequence(  # type: ignore[assignment]
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


def _stream(tokenizer: Tokenizer, ids: list[int], keep: tuple[str, ...] = ()) -> list[str]:
    stream = tokenizer.stream(keep)
    return [stream.push(i) for i in ids]


@pytest.mark.parametrize("text", TEXTS)
def test_stream_gives_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = _stream(tokenizer, ids)
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_stream_of_byte_fallback_ids() -> None:
    tokenizer = _byte_fallback()
    word = [tokenizer.backend.token_to_id("\u2581the"), tokenizer.backend.token_to_id("\u2581cat")]
    ids = word + [3 + b for b in "😀é".encode()] + word + [3 + b for b in "日本".encode()] + word
    assert (
        "".join(_stream(tokenizer, ids))
        == tokenizer.decode(ids)
        == "the cat😀é the cat日本 the cat"
    )


def test_stream_survives_any_ids(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for each in (tokenizer, _byte_fallback()):
        size = each.backend.get_vocab_size()
        for _ in range(100):
            _stream(each, [rng.randrange(size) for _ in range(80)])


def test_half_a_character_waits_for_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀")[:-1]
    stream = tokenizer.stream()
    assert "".join(stream.push(i) for i in ids) == "a"
    assert "a" + stream.finish() == tokenizer.decode(ids)
    assert stream.finish() == ""


def test_pieces_are_the_text_of_all_ids(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    size = tokenizer.backend.get_vocab_size()
    same = 0
    for _ in range(200):
        ids = [rng.randrange(size) for _ in range(6)]
        stream = tokenizer.stream()
        text = "".join(stream.push(i) for i in ids) + stream.finish()
        same += text == tokenizer.decode(ids)
    assert same == 200


def test_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert "".join(_stream(tokenizer, ids)) == "hi"
    assert "".join(_stream(tokenizer, ids, ("<|im_end|>",))) == "hi<|im_end|>"


def test_truncation_and_padding_of_the_file_are_ignored(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    copy = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    copy.enable_truncation(4)
    copy.enable_padding(length=64)
    copy.save(str(tmp_path / "tokenizer.json"))
    text = "a sentence of more than four tokens"
    assert Tokenizer.open(tmp_path).encode(text) == tokenizer.encode(text)


def test_every_eos_id_stops(endless: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((endless / "tokenizer.json").read_bytes())
    assert Tokenizer.open(tmp_path).stop_ids == frozenset()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 11}')
    assert Tokenizer.open(tmp_path).stop_ids == {7, 9, 11}


@pytest.mark.parametrize("value", ["</s>", [1, "2"], True, {}])
def test_eos_of_another_type(endless: Path, tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer.json").write_bytes((endless / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"config\.json.*eos_token_id"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "Nope"}}'])
def test_malformed_file_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(PackedModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.open(tmp_path)
