"""`seqmoe simulate`: recorded routing through a pool, on the CPU and without a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from seqmoe_cli.chat.console import is_terminal, make_console
from seqmoe_cli.commands.bench import FORMAT_NAMES
from seqmoe_cli.commands.options import MAX_TOKENS, check_choice, flag
from seqmoe_cli.commands.progress import status_line
from seqmoe_cli.errors import UsageError
from seqmoe_cli.settings import PoolSize, check_range

if TYPE_CHECKING:
    from rich.table import Table

    from seqmoe_cli.forecast.stored import StoredPredictor
    from seqmoe_cli.replay.rows import Row
    from seqmoe_cli.replay.study import Assumptions, Foresight, Study

_LISTED = "several with commas."


def _number(name: str, metavar: str, low: float, high: float, help: str) -> Any:
    def checked(value: float) -> float:
        check_range(name, value, low, high)
        return value

    return typer.Option(name, metavar=metavar, help=help, callback=checked)


_Traces = Annotated[
    list[str],
    typer.Argument(
        metavar="TRACE",
        help="Files of seqmoe trace, routing tables in CSV, delta-coded .npy; or qwen3.",
        show_default=False,
    ),
]
_Pools = Annotated[
    str,
    typer.Option(
        "--pool", metavar="LIST", help=f"Pool sizes: all, 45%, 2GiB or 64slots; {_LISTED}"
    ),
]
_Policies = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="LIST",
        help="lru, decayed, s3fifo, forecast; window and belady, which know the future.",
    ),
]
_Prefetches = Annotated[
    str, typer.Option("--prefetch", metavar="LIST", help="off, lookahead, full or oracle.")
]
_Forecast = Annotated[
    str,
    typer.Option(
        "--forecast",
        metavar="NAME",
        help="none, persistence, popularity, decayed, blurred (the truth, blurred) or predictor.",
    ),
]
_Predictor = Annotated[
    str | None,
    flag("--predictor", metavar="MODEL|FILE", help="The one of seqmoe train that predictor means."),
]
_Recall = Annotated[
    str, typer.Option("--recall", metavar="LIST", help="Of blurred, in steps 1, 2, 3-4, 5-8.")
]
_Precision = Annotated[
    str | None,
    flag("--precision", metavar="LIST", help="The same; recall * K / (K + 3) if not given."),
]
_Rare = Annotated[
    float, _number("--rare", "X", 0.01, 1, "Share of both for experts unused in 64 tokens.")
]
_LookAhead = Annotated[
    str,
    typer.Option(
        "--look-ahead",
        metavar="LIST",
        help="Recall of misses/precision of copies, for 1, 2, ... layers ahead.",
    ),
]
_Window = Annotated[int, _number("--window", "N", 1, MAX_TOKENS, "Tokens that window sees.")]
_HalfLife = Annotated[
    float, _number("--half-life", "N", 0.1, 1e4, "Tokens until a use counts half.")
]
_Discount = Annotated[float, _number("--discount", "N", 0.1, 1e4, "The same for expected uses.")]
_Skip = Annotated[int, _number("--skip", "N", 0, MAX_TOKENS, "First tokens, not counted.")]
_Tokens = Annotated[
    int | None, flag("--tokens", metavar="N", help="Replay the first N tokens only.")
]
_Prompts = Annotated[bool, flag("--prompts", help="Replay tokens of prompts too, one by one.")]
_Record = Annotated[int, _number("--record-bytes", "N", 1, 2**40, "Bytes of an expert.")]
_Step = Annotated[
    float, _number("--step-ms", "MS", 1e-3, 1e6, "Time of a token that misses nothing.")
]
_Fetch = Annotated[float, _number("--fetch-gb", "GB", 1e-3, 1e6, "GB/s of a fetch.")]
_Dma = Annotated[float, _number("--dma-gb", "GB", 1e-3, 1e6, "GB/s of a prefetch.")]
_Launch = Annotated[float, _number("--launch-us", "US", 0, 1e6, "Until a fetch moves bytes.")]
_Delay = Annotated[float, _number("--delay-us", "US", 0, 1e6, "From a request to its copy.")]
_Least = Annotated[float, _number("--least", "P", 0, 1, "Prefetch nothing less probable.")]
_Budget = Annotated[int, _number("--budget", "N", 0, MAX_TOKENS, "Most prefetches in a token.")]
_InFlight = Annotated[int, _number("--in-flight", "N", 1, 64, "Most prefetches under way at once.")]
_Every = Annotated[int, _number("--every", "N", 1, 1024, "Ask behind one of N layers.")]
_Slack = Annotated[float, _number("--slack", "X", 0, 1, "Lateness allowed, in fetches.")]
_Seed = Annotated[int, _number("--seed", "N", 0, 2**32, "Of everything blurred.")]
_Output = Annotated[
    str, typer.Option("-o", "--output", metavar="|".join(FORMAT_NAMES), help="Output format.")
]


def simulate(
    traces: _Traces,
    pool: _Pools = "15%,25%,45%",
    policy: _Policies = "lru,decayed,s3fifo,forecast,belady",
    prefetch: _Prefetches = "off",
    forecast: _Forecast = "blurred",
    predictor: _Predictor = None,
    recall: _Recall = "0.7,0.6,0.5,0.45",
    precision: _Precision = None,
    rare: _Rare = 0.5,
    look_ahead: _LookAhead = "0.751/0.680,0.669/0.550,0.613/0.461,0.573/0.399",
    window: _Window = 8,
    half_life: _HalfLife = 16.0,
    discount: _Discount = 2.0,
    skip: _Skip = 0,
    tokens: _Tokens = None,
    prompts: _Prompts = False,
    record_bytes: _Record = 4_722_688,
    step_ms: _Step = 1.7,
    fetch_gb: _Fetch = 48.0,
    dma_gb: _Dma = 52.0,
    launch_us: _Launch = 1.2,
    delay_us: _Delay = 40.0,
    least: _Least = 0.25,
    budget: _Budget = 64,
    in_flight: _InFlight = 2,
    every: _Every = 1,
    slack: _Slack = 0.0,
    seed: _Seed = 0,
    output: _Output = "md",
) -> None:
    """Replay recorded routing through an expert pool: hits, loads and stall.

    No model and no GPU. Lists make the cross product. The defaults of link and times are those of
    Qwen3-30B-A3B-FP8 on an H200. Look-ahead is simulated: it is the trace's truth, blurred to a
    recall and a precision, and so is the forecast unless another is named. A copy that is late
    counts as a miss.
    """
    from seqmoe_cli.replay.flight import Prefetching
    from seqmoe_cli.replay.link import Link
    from seqmoe_cli.replay.study import FORECASTS, POLICIES, PREFETCHES, Assumptions

    check_choice("--forecast", forecast, FORECASTS)
    check_choice("-o", output, FORMAT_NAMES)
    pools = [_pool(word) for word in dict.fromkeys(pool.split(","))]
    policies = _words("--policy", policy, POLICIES)
    prefetches = _words("--prefetch", prefetch, PREFETCHES)
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
    stored = None if predictor is None else _predictor(predictor)
    known = Assumptions(
        step_s=1e-3 * step_ms,
        link=Link(
            record_bytes=record_bytes,
            fetch_bytes_per_s=1e9 * fetch_gb,
            dma_bytes_per_s=1e9 * dma_gb,
            launch_s=1e-6 * launch_us,
            delay_s=1e-6 * delay_us,
        ),
        rules=Prefetching(
            in_flight=in_flight, budget=budget, least=least, slack=slack, every=every
        ),
        look_ahead=_accuracy(look_ahead),
        forecast=forecast,
        predictor=None if stored is None else _foresight(stored),
        recall=_shares("--recall", recall),
        precision=_shares("--precision", precision) if precision else (),
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
    from seqmoe_cli.replay.study import Part, Study

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


def _pool(word: str) -> PoolSize:
    size = PoolSize.parse(word)
    if size.kind == "auto":
        raise UsageError("--pool auto: there is no device to look at", "give a share, as in 45%")
    return size


def _words(name: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        check_choice(name, word, allowed)
    return words


def _share(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise UsageError(f"{name} {text!r} is no share", "use numbers above 0, 1 at the most")
    return value


def _shares(name: str, text: str) -> tuple[float, ...]:
    """One number for all four windows of a forecast, or one for each."""
    shares = tuple(_share(name, word) for word in text.split(","))
    if len(shares) not in (1, 4):
        raise UsageError(f"{name} {text!r} has {len(shares)} numbers", "give one or four")
    return shares * (4 // len(shares))


def _accuracy(text: str) -> tuple[tuple[float, float], ...]:
    """Recall and precision by layers ahead."""
    pairs = []
    for word in text.split(","):
        recall, slash, precision = word.partition("/")
        if not slash:
            raise UsageError(f"--look-ahead {word!r} has no /", "write recall/precision: 0.75/0.68")
        pairs.append((_share("--look-ahead", recall), _share("--look-ahead", precision)))
    return tuple(pairs)


def _print(
    studies: list[Study],
    pools: list[PoolSize],
    policies: list[str],
    prefetches: list[str],
    output: str,
) -> None:
    """A table of rich on a terminal, else the lines of the format as they come."""
    from seqmoe_cli.bench.formats import csv_lines, json_array, json_lines
    from seqmoe_cli.replay.rows import markdown

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

    from seqmoe_cli.replay.rows import COLUMNS, NUM_TEXT_COLUMNS

    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for i, (title, _) in enumerate(COLUMNS):
        side: Literal["left", "right"] = "left" if i < NUM_TEXT_COLUMNS else "right"
        table.add_column(title.replace("/", " /"), justify=side, no_wrap=side == "left")
    for row in rows:
        table.add_row(*(cell(row) for _, cell in COLUMNS))
    return table
