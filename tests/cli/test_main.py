"""What every command line has in common: exit codes, short messages, and a stdout that breaks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import pytest
import typer

from seqmoe_cli import __version__
from seqmoe_cli.errors import SeqmoeError, UsageError
from seqmoe_cli.main import app, main

SEQMOE = [sys.executable, "-m", "seqmoe_cli"]
Register = Callable[[Callable[..., object]], None]


@pytest.fixture
def register() -> Iterator[Register]:
    """Adds a command called `probe` for one test."""
    before = list(app.registered_commands)
    yield lambda function: app.command("probe")(function) and None
    app.registered_commands[:] = before


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"seqmoe {__version__}\n", "")


def test_without_a_command_the_help_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Commands:" in err


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--hlep"], ["--hlep", "seqmoe --help"]),
        (["chatt"], ["'chatt'", "seqmoe --help"]),
        (["doctor", "extra"], ["extra", "seqmoe doctor --help"]),
        (["doctor", "--jsn"], ["--jsn", "--json"]),
        (["probe", "--share", "-3"], ["--share", "'-3'", "0"]),
        (["probe", "--share", "nan"], ["--share", "'nan'", "1"]),
        (["probe", "--share", "x\n\ny"], ["--share", "number"]),
        (["probe", "--share"], ["--share", "argument"]),
    ],
)
def test_usage_errors_are_short_and_name_flag_and_value(
    argv: list[str], names: list[str], register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    def probe(share: Annotated[float, typer.Option(min=0, max=1)] = 0.5) -> None: ...

    register(probe)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("seqmoe: ")
    assert err.count("\n") == 2
    assert all(name in err for name in names), err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (SeqmoeError("a.bin: cut short", "copy it again"), 1, "a.bin: cut short\n  copy it again"),
        (SeqmoeError("a.bin: cut short"), 1, "a.bin: cut short"),
        (UsageError("--pool 0: too small", "use 2slots"), 2, "--pool 0: too small\n  use 2slots"),
        (OSError(errno.ENOSPC, "No space left"), 1, "cannot write the output: No space left"),
    ],
)
def test_failures_are_one_or_two_lines_on_stderr(
    error: Exception,
    code: int,
    message: str,
    register: Register,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def probe() -> None:
        raise error

    register(probe)
    assert main(["probe"]) == code
    assert capsys.readouterr() == ("", f"seqmoe: {message}\n")


def test_an_interrupt_is_130(register: Register) -> None:
    def probe() -> None:
        raise KeyboardInterrupt

    register(probe)
    assert main(["probe"]) == 130


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("another")])
def test_a_bug_keeps_its_traceback(error: Exception, register: Register) -> None:
    def probe() -> None:
        raise error

    register(probe)
    with pytest.raises(type(error)):
        main(["probe"])


def test_shell_completion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_SEQMOE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "seqmoe chat --poo")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert main([]) == 0
    assert capsys.readouterr() == ("--pool\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"], ["doctor", "--json"]])
@pytest.mark.parametrize(
    ("redirect", "num_lines"), [(">&-", 2), (">/dev/full", 1), (">/dev/full 2>&-", 0)]
)
def test_a_stdout_that_cannot_be_written_fails_quietly(
    arguments: list[str], redirect: str, num_lines: int
) -> None:
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirect}', "bash", *SEQMOE, *arguments],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == num_lines, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"], ["doctor", "--json"]])
def test_a_reader_that_has_gone_fails_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*SEQMOE, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr.startswith("seqmoe: cannot write the output: ")
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_file_that_cannot_be_read_is_named(
    register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    def probe() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/models/secret")

    register(probe)
    assert main(["probe"]) == 1
    err = capsys.readouterr().err
    assert err == "seqmoe: cannot read or write /models/secret: Permission denied\n"
