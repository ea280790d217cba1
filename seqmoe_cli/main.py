"""The command line: registers the commands and turns every failure into a short message and an exit
code. Imports no torch; each command imports what it needs when it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Annotated

import typer
from typer.main import get_command

from seqmoe_cli import __version__
from seqmoe_cli.commands.bench import bench
from seqmoe_cli.commands.chat import chat
from seqmoe_cli.commands.convert import convert
from seqmoe_cli.commands.doctor import doctor
from seqmoe_cli.commands.info import info
from seqmoe_cli.commands.perplexity import perplexity
from seqmoe_cli.commands.trace import trace
from seqmoe_cli.commands.train import train
from seqmoe_cli.environment import prepare_torch
from seqmoe_cli.errors import SeqmoeError, UsageError

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (chat, bench, convert, info, doctor, perplexity, trace, train):
    app.command()(_command)


@app.callback(invoke_without_command=True)
def seqmoe(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Chat with Mixture-of-Experts models whose experts live in host RAM."""
    if version:
        typer.echo(f"seqmoe {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def main(argv: list[str] | None = None) -> int:
    """Run `seqmoe` with `argv` (default: the process's own) and return its exit code."""
    return run(app, "seqmoe", argv)


def run(program: typer.Typer, name: str, argv: list[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 for a failure, 2 for wrong usage, 130 when
    interrupted. A bug leaves as the exception it is."""
    prepare_torch()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
    if sys.stdout is None:  # closed by the caller: files opened later would take its place
        return _fail("standard output is closed", "redirect it to a file or to /dev/null", 1)
    code = _run(program, name, argv)
    if code == 130 and argv is None:  # pressed again while the interpreter ends
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _output_failed(error)
    return code


def _run(program: typer.Typer, name: str, argv: list[str] | None) -> int:
    try:
        code = get_command(program).main(args=argv, prog_name=name, standalone_mode=False)
    except SeqmoeError as error:
        return _fail(error.message, error.hint, 2 if isinstance(error, UsageError) else 1)
    except typer.TyperException as error:
        return _fail(*_usage(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:
        if error.filename is not None:
            return _fail(f"cannot read or write {error.filename}: {error.strerror}", "", 1)
        return _output_failed(error)
    except SystemExit as stop:  # after shell completion, or when the reader of a pipe has gone
        return _output_failed(stop) if stop.code else 0
    return code if isinstance(code, int) else 0


def _fail(message: str, hint: str, code: int) -> int:
    """Print one or two lines on stderr; returns `code`."""
    with contextlib.suppress(OSError):  # the terminal itself may be gone
        print(f"seqmoe: {message}" + (f"\n  {hint}" if hint else ""), file=sys.stderr)
    return code


def _usage(error: typer.TyperException) -> tuple[str, str]:
    """Flag, value and what is allowed, on one line; and where to read more."""
    text = " ".join(error.format_message().split())
    details = getattr(error.__cause__, "errors", None)  # a value that pydantic refused
    if callable(details):
        text = text.replace("Input should", f"{details()[0]['input']!r} should")
        text = text.replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    hint = f"see '{context.command_path if context else 'seqmoe'} --help'"
    return text[:1].lower() + text[1:], hint


def _output_failed(error: OSError | SystemExit) -> int:
    """Point stdout at /dev/null, so that what is still buffered cannot fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _fail(f"cannot write the output: {getattr(error, 'strerror', 'closed pipe')}", "", 1)
