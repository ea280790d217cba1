"""The text that is shipped."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from seqmoe_cli.text.files import shipped_text


def test_the_shipped_text_is_plain_prose_with_a_note_of_its_origin() -> None:
    text, name = shipped_text()
    assert 60_000 < len(text) < 100_000
    assert text.isascii() and "<|" not in text and "\r" not in text
    words = text.split()
    assert len(set(words)) / len(words) < 0.4  # repeats as language does, but is not one word
    note = files("seqmoe_cli").joinpath("data", "NOTICE.md").read_text("utf-8")
    assert Path(name).name in note and "Public domain" in note
