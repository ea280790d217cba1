"""`python -m tools.simulator`: recorded routing through a pool, on the CPU, without a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Literal

from seqmoe_cli.commands.options import check_choice
from seqmoe_cli.errors import UsageError
from seqmoe_cli.settings import PoolSize
from seqmoe_cli.terminal.console import is_terminal, make_console
from seqmoe_cli.terminal.progress import status_line
from seqmoe_cli.terminal.table import FORMAT_NAMES, PLAIN, Row, markdown
from tools.simulator import options

if TYPE_CHECKING:
    from rich.table import Table

    from seqmoe_cli.forecast.stored import StoredPredictor
    from tools.simulator.study import Assumptions, MakeForecast, Study

NAME = "python -m tools.simulator"
_USUAL_DELAY_US = {"gpu": 12.0, "thread": 40.0}  # from a request to the start of its copy


def simulate(
    traces: options.Traces,
    pool: options.Pools = "15%,25%,45%",
    policy: options.Policies = "lru,decayed,s3fifo,forecast,belady",
    prefetch: options.Prefetches = "off",
    prefetch_by: options.PrefetchBy = "gpu",
    forecast: options.Forecast = "blurred",
    predictor: options.Predictor = None,
    recall: options.Recall = "0.7,0.6,0.5,0.45",
    precision: options.Precision = None,
    rare: options.Rare = 0.5,
    look_ahead: options.LookAhead = "0.751/0.680,0.669/0.550,0.613/0.461,0.573/0.399",
    window: options.Window = 8,
    half_life: options.HalfLife = 16.0,
    discount: options.Discount = 2.0,
    skip: options.Skip = 0,
    tokens: options.Tokens = None,
    prompts: options.Prompts = False,
    record_bytes: options.Record = 4_722_688,
    step_ms: options.Step = 1.7,
    fetch_gb: options.Fetch = 48.0,
    dma_gb: options.Dma = None,
    launch_us: options.Launch = 1.2,
    delay_us: options.Delay = None,
    least: options.Least = 0.25,
    budget: options.Budget = 64,
    in_flight: options.InFlight = 2,
    every: options.Every = 1,
    slack: options.Slack = None,
    seed: options.Seed = 0,
    output: options.Output = "md",
) -> None:
    """Replay recorded routing through an expert pool: hits, loads and stall.

    Needs no model and no GPU. Where a list is given, every combination gets a row. The default
    times are those of Qwen3-30B-A3B-FP8 on one H200. Look-ahead is simulated: it names the experts
    that the trace really uses, with errors at a chosen rate. So does the forecast, unless
    --forecast names another. A copy that comes late counts as a miss.
    """
    from tools.simulator.flight import PrefetchRules
    from tools.simulator.link import PREFETCH_BY, Link
    from tools.simulator.study import FORECASTS, POLICIES, PREFETCHES, Assumptions

    check_choice("--forecast", forecast, FORECASTS)
    check_choice("--prefetch-by", prefetch_by, PREFETCH_BY)
    check_choice("-o", output, FORMAT_NAMES)
    pools = [options.read_pool(word) for word in dict.fromkeys(pool.split(","))]
    policies = options.read_words("--policy", policy, POLICIES)
    prefetches = options.read_words("--prefetch", prefetch, PREFETCHES)
    if (forecast == "predictor") != (predictor is not None):
        raise UsageError(
            "--forecast predictor and --predictor belong together",
            "write: --forecast predictor --predictor MODEL",
        )
    if predictor is not None and "forecast" not in policies and "full" not in prefetches:
        raise UsageError(
            "--forecast predictor would not be used",
            "add --policy forecast or --prefetch full, or leave it and --predictor out",
        )
    for name, value in (("--dma-gb", dma_gb), ("--slack", slack)):
        if value is not None and prefetch_by == "gpu":
            raise UsageError(
                f"{name} has no effect on copies by gpu",
                "leave it out, or add --prefetch-by thread",
            )
    stored = None if predictor is None else options.read_predictor(predictor)
    known = Assumptions(
        step_s=1e-3 * step_ms,
        link=Link(
            record_bytes=record_bytes,
            fetch_bytes_per_s=1e9 * fetch_gb,
            launch_s=1e-6 * launch_us,
            prefetch_by=prefetch_by,
            delay_s=1e-6 * (_USUAL_DELAY_US[prefetch_by] if delay_us is None else delay_us),
            dma_bytes_per_s=1e9 * (dma_gb or 52.0),
            slack=slack or 0.0,
        ),
        rules=PrefetchRules(in_flight=in_flight, budget=budget, least=least, every=every),
        look_ahead=options.read_accuracy(look_ahead),
        forecast=forecast,
        predictor=None if stored is None else _from_predictor(stored),
        recall=options.read_shares("--recall", recall),
        precision=options.read_shares("--precision", precision) if precision else (),
        rare=rare,
        half_life=half_life,
        discount=discount,
        window=window,
        seed=seed,
    )
    studies = _studies(traces, known, prompts, tokens, skip)
    for study in studies:
        if stored is not None:
            stored.check_trace(study.part.whole)
        for size in pools:
            study.num_slots(size)
    _print(studies, pools, policies, prefetches, output)


def _studies(
    traces: list[str], known: Assumptions, prompts: bool, tokens: int | None, skip: int
) -> list[Study]:
    from tools.simulator.importers import open_any_trace
    from tools.simulator.study import Part, Study

    parts = [
        Part.of(name, open_any_trace(name), prompts=prompts, tokens=tokens, skip=skip)
        for name in traces
    ]
    return [Study(part, known) for part in parts]


def _from_predictor(stored: StoredPredictor) -> MakeForecast:
    """The forecast that a trained predictor makes."""
    from seqmoe_cli.forecast.predictions import Predictions
    from tools.simulator.forecasts import Predicted

    return lambda whole, tokens: Predicted(Predictions(stored.predictor, whole).blocks(), tokens)


def _print(
    studies: list[Study],
    pools: list[PoolSize],
    policies: list[str],
    prefetches: list[str],
    output: str,
) -> None:
    """A table on a terminal; else the lines of the format, each as soon as its row is there."""
    from tools.simulator.rows import COLUMNS

    with status_line() as tell:

        def rows() -> Iterator[Row]:
            for study, size, name, way in product(studies, pools, policies, prefetches):
                tell(f"{study.part.name}, pool {size.text}, {name}, prefetch {way}")
                yield study.row(size, name, way).to_dict()

        if output == "md" and is_terminal(sys.stdout):
            table = _table(rows())
            tell.clear()
            make_console(sys.stdout).print(table)
        else:
            lines = markdown(COLUMNS, rows()) if output == "md" else PLAIN[output](rows())
            for line in lines:
                tell.clear()
                print(line, flush=True)
    if output == "md":
        print(f"\n{studies[0].note(policies, prefetches)}")


def _table(rows: Iterator[Row]) -> Table:
    from rich.table import Table

    from tools.simulator.rows import COLUMNS

    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for column in COLUMNS:
        side: Literal["left", "right"] = "left" if column.left else "right"
        table.add_column(column.title.replace("/", " /"), justify=side, no_wrap=column.left)
    for row in rows:
        table.add_row(*(column.cell(row) for column in COLUMNS))
    return table


def main(argv: list[str] | None = None) -> int:
    """Run the simulator with `argv` (default: the process's own) and return its exit code."""
    return options.run_command(simulate, NAME, argv)


if __name__ == "__main__":
    sys.exit(main())
