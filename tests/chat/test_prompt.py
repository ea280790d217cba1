from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from seqmoe_cli.chat.prompt import Question, Sources, read_question
from seqmoe_cli.errors import PromptError, UsageError

UseStdin = Callable[..., None]


class _Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes = b"", terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data), encoding="ascii")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> UseStdin:
    def use(data: bytes = b"", terminal: bool = False) -> None:
        monkeypatch.setattr("sys.stdin", _Stdin(data, terminal))

    use(terminal=True)
    return use


def _user(question: Question) -> str:
    assert [m["role"] for m in question.messages] == ["user"]
    return question.messages[0]["content"]


def test_order_and_blank_lines(stdin: UseStdin, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes("  from é file\n\n".encode())
    stdin("from stdin 😀\n".encode())
    sources = Sources(prompt="from flag", file=str(file))
    assert _user(read_question(sources)) == "from flag\n\n  from é file\n\nfrom stdin 😀"
    stdin(b"only\nthis\n")
    assert _user(read_question(Sources())) == "only\nthis"
    stdin(b"piped\n")
    assert _user(read_question(Sources(prompt="a", file="-"))) == "a\n\npiped"
    stdin(b"")  # an empty pipe adds nothing
    assert _user(read_question(Sources(prompt="a"))) == "a"


def test_raw_text_stays_as_it_is(stdin: UseStdin, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b" Once\r\n\n")
    assert read_question(Sources(file=str(file), raw=True)) == Question(" Once\r\n\n")
    assert read_question(Sources(prompt=" ", raw=True)) == Question(" ")
    with pytest.raises(UsageError, match="--raw needs a text"):
        read_question(Sources(raw=True))


def test_no_prompt(stdin: UseStdin, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_question(Sources(system="Be kind.")) == Question(system="Be kind.")
    assert read_question(Sources()).is_open
    for data in (b"", b"\n", b" \n\n"):
        stdin(data)
        with pytest.raises(UsageError, match="there is no prompt"):
            read_question(Sources())
    stdin(terminal=True)
    with pytest.raises(UsageError, match="there is no prompt"):
        read_question(Sources(prompt=""))
    monkeypatch.setattr("sys.stdin", None)  # closed by the caller
    with pytest.raises(UsageError, match="there is no prompt"):
        read_question(Sources())


def test_system_prompt(stdin: UseStdin, tmp_path: Path) -> None:
    file = tmp_path / "s"
    file.write_text("Be brief.\n")
    assert read_question(Sources(prompt="x", system_file=str(file))).system == "Be brief."
    file.write_text("\n")
    with pytest.raises(PromptError, match=r"--system-file \S+ is empty"):
        read_question(Sources(prompt="x", system_file=str(file)))


@pytest.mark.parametrize(
    "sources",
    [
        Sources(prompt="x", messages="m"),
        Sources(file="x", messages="m"),
        Sources(raw=True, messages="m"),
        Sources(raw=True, prompt="x", system="s"),
        Sources(raw=True, prompt="x", system_file="s"),
        Sources(prompt="x", system="s", system_file="s"),
    ],
)
def test_flags_that_exclude_each_other(stdin: UseStdin, sources: Sources) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        read_question(sources)


def test_unreadable_text(stdin: UseStdin, tmp_path: Path) -> None:
    def refused(**flags: str) -> str:
        with pytest.raises(PromptError) as caught:
            read_question(Sources(**flags))  # type: ignore[arg-type]
        return caught.value.message

    file = tmp_path / "f"
    assert refused(file=str(file)) == f"--file {file} cannot be read: No such file or directory"
    assert "Is a directory" in refused(file=str(tmp_path))
    assert "cannot be read" in refused(file="a\0b")
    file.write_bytes(b"ab\xffcd")
    assert refused(file=str(file)) == f"--file {file} is not UTF-8 text: byte 0xff at offset 2"
    file.write_bytes(b" \n")
    assert refused(file=str(file)) == f"--file {file} is empty"
    assert refused(prompt="\udcff") == "--prompt is not UTF-8 text"
    stdin(b"\xc3")
    assert refused().startswith("standard input is not UTF-8 text")


def test_messages(stdin: UseStdin, tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    conversation = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "é", "name": "me"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"},
    ]
    file.write_text(json.dumps(conversation, ensure_ascii=False), "utf-8")
    del conversation[1]["name"]
    assert read_question(Sources(messages=str(file))).messages == tuple(conversation)
    stdin(json.dumps(conversation[1:]).encode())
    question = read_question(Sources(messages="-", system="S"))
    assert question.messages == tuple(conversation[1:]) and question.system == "S"
    with pytest.raises(UsageError, match="system message of its own"):
        read_question(Sources(messages=str(file), system="S"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("[{]", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "is not a list"),
        ("[]", "is not a list"),
        ('["hi"]', "message 1 is no object"),
        ('[{"role": "user"}]', "message 1 has no text in content"),
        ('[{"role": "user", "content": [1]}]', "message 1 has no text in content"),
        ('[{"role": "user", "content": "\\ud800"}]', "message 1 is not UTF-8"),
        (
            '[{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]',
            "message 2 .*'bot'",
        ),
        ('[{"content": "a"}]', "message 1 has the role None"),
        ('[{"role": "assistant", "content": "a"}]', "the last message is not the user's"),
    ],
)
def test_malformed_messages(stdin: UseStdin, tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "m.json"
    file.write_text(content)
    with pytest.raises(PromptError, match=rf"--messages {file}.*{message}"):
        read_question(Sources(messages=str(file)))
