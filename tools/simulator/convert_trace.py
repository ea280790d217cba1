"""`python -m tools.simulator.convert_trace`: a trace that another program recorded, as a file that
seqmoe opens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from seqmoe_cli.commands.options import check_output
from tools.simulator import options

NAME = "python -m tools.simulator.convert_trace"


def convert_trace(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN",
            help="Routing table in CSV or delta-coded .npy, also packed with xz.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="The file to write.", show_default=False)
    ],
) -> None:
    """Turn a trace of another program into one of seqmoe."""
    from tools.simulator.importers import open_any_trace

    check_output("OUT", output)
    open_any_trace(source).save(output)


def main(argv: list[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's own) and return its exit code."""
    return options.run_command(convert_trace, NAME, argv)


if __name__ == "__main__":
    sys.exit(main())
