"""Streaming seen through a terminal emulator: every row once, the status line always there."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence

import pytest
from rich.cells import cell_len

from seqmoe_cli.chat.stream import AnswerView, row_breaks
from seqmoe_cli.terminal.console import make_console
from tests.chat.screen import Screen, terminal_console


def _show(
    pieces: Sequence[str], columns: int = 80, check: Callable[[Screen], None] = lambda screen: None
) -> list[str]:
    """All rows at the end; `check` looks at the screen after every write to the terminal, and the
    status line must be the screen's last text after every piece."""
    screen = Screen(columns)
    with AnswerView(terminal_console(screen, lambda: check(screen)), live=True) as view:
        for n, piece in enumerate(pieces):
            view.write(piece, "dim" if n % 2 else "", f"STATUS {n}")
            shown = [line for line in screen.display if line]
            assert shown[-1] == f"STATUS {n}"[: columns - 1]
            assert sum("STATUS" in line for line in shown) == 1
    assert not any("STATUS" in line for line in screen.lines)
    return screen.lines


def _no_repeats(screen: Screen) -> None:
    words = re.findall(r"w\d+(?= )", " ".join(screen.display))
    assert words == sorted(set(words), key=lambda word: int(word[1:]))


@pytest.mark.parametrize("count", [60, 200])
def test_an_answer_taller_than_the_screen(count: int) -> None:
    pieces = [p for n in range(count) for p in (f"w{n} ", "[red]is [/]:smile: {}", f"{n}\n")]
    expected = [f"w{n} [red]is [/]:smile: {{}}{n}" for n in range(count)]
    assert _show(pieces, check=_no_repeats) == expected


def test_one_long_paragraph() -> None:
    words = [f"w{n} " for n in range(400)]
    lines = _show(words, check=_no_repeats)
    assert " ".join(lines).split() == [word.strip() for word in words]
    assert len(lines) == len("".join(words)) // 79 + 1  # words, not rows, are broken apart


@pytest.mark.parametrize("columns", [80, 41, 12])
def test_wide_characters_and_emoji(columns: int) -> None:
    pieces = list("日本語テキスト😀é") * 20
    lines = _show(pieces, columns)
    assert "".join(lines) == "".join(pieces)
    assert all(columns - 3 <= cell_len(line) < columns for line in lines[:-1])


def test_words_longer_than_a_row() -> None:
    lines = _show(["hello ", *["x" * 13] * 40, " bye"])
    assert lines[0] == "hello"
    assert "".join(lines[1:]) == "x" * 13 * 40 + " bye"


def test_blank_rows_indentation_and_tabs_stay() -> None:
    assert _show(["a\n", "\n\n", "    code\n", "\tx\n", "  ", "y"]) == [
        "a", "", "", "    code", "    x", "  y",
    ]  # fmt: skip


def test_many_rows_in_one_piece() -> None:
    text = "\n".join(f"row {n}" for n in range(100))
    assert _show([text, "!"]) == (text + "!").split("\n")


def test_a_model_cannot_drive_the_terminal() -> None:
    assert _show(["a\x1b[2J", "\x1b]0;title\x07b", "\rc\x9b31m\x00"]) == ["a[2J]0;titlebc31m"]


def test_plain_view_writes_the_text_alone() -> None:
    out = io.StringIO()
    with AnswerView(make_console(out), live=False) as view:
        view.status("STATUS")
        for piece in ("[b]a ", "", "b" * 200, "\n\n", "\tc \x1b[1m", ""):
            view.write(piece, "dim", "STATUS")
    assert out.getvalue() == "[b]a " + "b" * 200 + "\n\n        c [1m\n"


def test_plain_view_adds_no_second_newline() -> None:
    out = io.StringIO()
    with AnswerView(make_console(out), live=False) as view:
        view.write("a\n")
        view.write("")
        view.close()
    assert out.getvalue() == "a\n"


@pytest.mark.parametrize("live", [False, True])
def test_paragraph_between_a_thought_and_the_answer(live: bool) -> None:
    for thought in ("hm", "hm\n"):
        screen = Screen()
        with AnswerView(terminal_console(screen), live) as view:
            view.write(thought, "dim")
            view.end_paragraph()
            view.write("yes")
        assert screen.lines == ["hm", "", "yes"]


def test_status_line_is_cut_to_the_width() -> None:
    screen = Screen(20)
    with AnswerView(terminal_console(screen), live=True) as view:
        view.status("s" * 50)
        assert [line for line in screen.lines if line] == ["s" * 19]


def test_appending_moves_no_finished_break() -> None:
    text = "some words, averyveryverylongword and 日本語テキスト then   blanks   " * 3
    for width in (5, 9, 20):
        done: list[int] = []
        for end in range(len(text) + 1):
            breaks = row_breaks(text[:end], width)
            assert breaks[: max(0, len(done) - 1)] == done[:-1]
            done = breaks
        rows = [text[a:b] for a, b in zip([0, *done], [*done, None], strict=True)]
        assert "".join(rows) == text and all(cell_len(row.rstrip()) <= width for row in rows)
