"""`python -m tools.simulator.recall`: how well forecasts name the coming uses of a trace: those by
counting, and a trained predictor."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from seqmoe_cli.commands.options import JsonOption
from seqmoe_cli.terminal.progress import status_line
from tools.simulator import options

NAME = "python -m tools.simulator.recall"


def recall(
    learned: Annotated[
        str,
        typer.Argument(
            metavar="LEARNED", help="Trace that counting learns from.", show_default=False
        ),
    ],
    held_out: Annotated[
        str | None,
        typer.Argument(
            metavar="[HELD_OUT]",
            help="Trace to judge on; if not given, LEARNED is divided as seqmoe train does it.",
            show_default=False,
        ),
    ] = None,
    predictor: options.Predictor = None,
    as_json: JsonOption = False,
) -> None:
    """Judge forecasts of coming uses by distance, depth, rarity and the misses of a pool."""
    from seqmoe_cli.forecast.corpus import divide
    from seqmoe_cli.forecast.predictions import Predictions
    from tools.simulator.importers import open_any_trace
    from tools.simulator.recall_study import recall as judge
    from tools.simulator.recall_table import recall_facts, recall_tables

    part = open_any_trace(learned)
    part, judged = (part, open_any_trace(held_out)) if held_out else divide(part)
    predicted = None
    if predictor is not None:
        stored = options.read_predictor(predictor)
        stored.check_trace(judged)
        predicted = Predictions(stored.predictor, judged).blocks
    with status_line() as tell:
        found = judge(part, judged, predicted, tell=tell)
    if as_json:
        print(json.dumps(recall_facts(found), indent=2))
        return
    for line in recall_tables(found):
        print(line)


def main(argv: list[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's own) and return its exit code."""
    return options.run_command(recall, NAME, argv)


if __name__ == "__main__":
    sys.exit(main())
