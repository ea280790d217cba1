"""The text that is shipped, and how a text of the user is read."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from seqmoe_cli.bench.text import read_text, shipped_text
from seqmoe_cli.errors import PromptError


def test_the_shipped_text_is_plain_prose_with_a_note_of_its_origin() -> None:
    text, name = shipped_text()
    assert 60_000 < len(text) < 100_000
    assert text.isascii() and "<|" not in text and "\r" not in text
    words = text.split()
    assert len(set(words)) / len(words) < 0.4  # repeats as language does, but is not one word
    note = files("seqmoe_cli").joinpath("data", "NOTICE.md").read_text("utf-8")
    assert Path(name).name in note and "Public domain" in note


def test_a_file_is_taken_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "text"
    data = b"\xef\xbb\xbfone\r\ntwo\rthree\n\x00\xc3\xbc"
    path.write_bytes(data)
    assert read_text(path).encode() == data


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(PromptError) as caught:
        read_text(path)
    assert str(path) in caught.value.message and "byte 3" in caught.value.message
    for missing in (tmp_path / "absent", tmp_path):
        with pytest.raises(PromptError) as caught:
            read_text(missing)
        assert str(missing) in caught.value.message
