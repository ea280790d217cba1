"""`python -m tools.simulator`: recorded routing through a pool, on the CPU and without a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from seqmoe_cli.commands.bench import FORMAT_NAMES
from seqmoe_cli.commands.options import check_choice
from seqmoe_cli.errors import UsageError
from seqmoe_cli.main import run
from seqmoe_cli.settings import PoolSize
from seqmoe_cli.terminal.console import is_terminal, make_console
from seqmoe_cli.terminal.progress import status_line
from tools.simulator.options import (
    BudgetOption,
    DelayOption,
    DiscountOption,
    DmaOption,
    EveryOption,
    FetchOption,
    ForecastOption,
    HalfLifeOption,
    InFlightOption,
    LaunchOption,
    LeastOption,
    LookAheadOption,
    OutputOption,
    PoliciesOption,
    PoolsOption,
    PrecisionOption,
    PredictorOption,
    PrefetchByOption,
    PrefetchesOption,
    PromptsOption,
    RareOption,
    RecallOption,
    RecordOption,
    SeedOption,
    SkipOption,
    SlackOption,
    StepOption,
    TokensOption,
    TracesOption,
    WindowOption,
    read_accuracy,
    read_pool,
    read_shares,
    read_words,
)

if TYPE_CHECKING:
    from rich.table import Table

    from seqmoe_cli.forecast.stored import StoredPredictor
    from tools.simulator.rows import Row
    from tools.simulator.study import Assumptions, Foresight, Study

_USUAL_US = {"gpu": 12.0, "thread": 40.0}  # from a request to its copy


def simulate(
    traces: TracesOption,
    pool: PoolsOption = "15%,25%,45%",
    policy: PoliciesOption = "lru,decayed,s3fifo,forecast,belady",
    prefetch: PrefetchesOption = "off",
    prefetch_by: PrefetchByOption = "gpu",
    forecast: ForecastOption = "blurred",
    predictor: PredictorOption = None,
    recall: RecallOption = "0.7,0.6,0.5,0.45",
    precision: PrecisionOption = None,
    rare: RareOption = 0.5,
    look_ahead: LookAheadOption = "0.751/0.680,0.669/0.550,0.613/0.461,0.573/0.399",
    window: WindowOption = 8,
    half_life: HalfLifeOption = 16.0,
    discount: DiscountOption = 2.0,
    skip: SkipOption = 0,
    tokens: TokensOption = None,
    prompts: PromptsOption = False,
    record_bytes: RecordOption = 4_722_688,
    step_ms: StepOption = 1.7,
    fetch_gb: FetchOption = 48.0,
    dma_gb: DmaOption = None,
    launch_us: LaunchOption = 1.2,
    delay_us: DelayOption = None,
    least: LeastOption = 0.25,
    budget: BudgetOption = 64,
    in_flight: InFlightOption = 2,
    every: EveryOption = 1,
    slack: SlackOption = None,
    seed: SeedOption = 0,
    output: OutputOption = "md",
) -> None:
    """Replay recorded routing through an expert pool: hits, loads and stall.

    No model and no GPU. Lists make the cross product. The defaults of link and times are those of
    Qwen3-30B-A3B-FP8 on an H200. Look-ahead is simulated: it is the trace's truth, blurred to a
    recall and a precision, and so is the forecast unless another is named. A copy that is late
    counts as a miss.
    """
    from tools.simulator.flight import Prefetching
    from tools.simulator.link import PREFETCH_BY, Link
    from tools.simulator.study import FORECASTS, POLICIES, PREFETCHES, Assumptions

    check_choice("--forecast", forecast, FORECASTS)
    check_choice("--prefetch-by", prefetch_by, PREFETCH_BY)
    check_choice("-o", output, FORMAT_NAMES)
    pools = [read_pool(word) for word in dict.fromkeys(pool.split(","))]
    policies = read_words("--policy", policy, POLICIES)
    prefetches = read_words("--prefetch", prefetch, PREFETCHES)
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
                f"{name} means nothing to copies by gpu",
                "leave it out, or add --prefetch-by thread",
            )
    stored = None if predictor is None else _predictor(predictor)
    known = Assumptions(
        step_s=1e-3 * step_ms,
        link=Link(
            record_bytes=record_bytes,
            fetch_bytes_per_s=1e9 * fetch_gb,
            launch_s=1e-6 * launch_us,
            prefetch_by=prefetch_by,
            delay_s=1e-6 * (_USUAL_US[prefetch_by] if delay_us is None else delay_us),
            dma_bytes_per_s=1e9 * (dma_gb or 52.0),
            slack=slack or 0.0,
        ),
        rules=Prefetching(in_flight=in_flight, budget=budget, least=least, every=every),
        look_ahead=read_accuracy(look_ahead),
        forecast=forecast,
        predictor=None if stored is None else _foresight(stored),
        recall=read_shares("--recall", recall),
        precision=read_shares("--precision", precision) if precision else (),
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
    from seqmoe_cli.forecast.shipped import open_trace
    from tools.simulator.study import Part, Study

    parts = [
        Part.of(name, open_trace(name), prompts=prompts, tokens=tokens, skip=skip)
        for name in traces
    ]
    return [Study(part, known) for part in parts]


def _predictor(source: str) -> StoredPredictor:
    """That of a model or a file."""
    import torch

    from seqmoe_cli.commands.options import find_model
    from seqmoe_cli.forecast.stored import open_predictor

    path = Path(source)
    return open_predictor(path if path.is_file() else find_model(source), torch.device("cpu"))


def _foresight(stored: StoredPredictor) -> Foresight:
    """What a trained predictor would say."""
    from seqmoe_cli.forecast.foreseen import Foreseen, ForeseenSteps
    from seqmoe_cli.residency.policies import ONE

    return lambda whole, replayed: ForeseenSteps(Foreseen(stored.predictor, whole), replayed, ONE)


def _print(
    studies: list[Study],
    pools: list[PoolSize],
    policies: list[str],
    prefetches: list[str],
    output: str,
) -> None:
    """A table of rich on a terminal, else the lines of the format as they come."""
    from seqmoe_cli.terminal.formats import csv_lines, json_array, json_lines
    from tools.simulator.rows import markdown

    formats = {"md": markdown, "csv": csv_lines, "json": json_array, "jsonl": json_lines}
    with status_line() as tell:

        def rows() -> Iterator[Row]:
            for study, size, name, way in product(studies, pools, policies, prefetches):
                tell(f"{study.part.name}, pool {size.text}, {name}, prefetch {way}")
                yield study.row(size, name, way)

        if output == "md" and is_terminal(sys.stdout):
            table = _table(rows())
            tell.clear()
            make_console(sys.stdout).print(table)
        else:
            for line in formats[output](rows()):
                tell.clear()
                print(line, flush=True)
    if output == "md":
        print(f"\n{studies[0].note(policies, prefetches)}")


def _table(rows: Iterator[Row]) -> Table:
    from rich.table import Table

    from tools.simulator.rows import COLUMNS, NUM_TEXT_COLUMNS

    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for i, (title, _) in enumerate(COLUMNS):
        side: Literal["left", "right"] = "left" if i < NUM_TEXT_COLUMNS else "right"
        table.add_column(title.replace("/", " /"), justify=side, no_wrap=side == "left")
    for row in rows:
        table.add_row(*(cell(row) for _, cell in COLUMNS))
    return table


app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(simulate)

if __name__ == "__main__":
    sys.exit(run(app, "simulate"))
