"""The options of the simulator, and how those that are lists are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seqmoe_cli.commands.options import MAX_TOKENS, check_choice, find_model, flag
from seqmoe_cli.errors import UsageError
from seqmoe_cli.main import run
from seqmoe_cli.settings import PoolSize, check_range
from seqmoe_cli.terminal.table import FORMAT_NAMES

if TYPE_CHECKING:
    from seqmoe_cli.forecast.stored import StoredPredictor

_LISTED = "several with commas."


def _number(name: str, metavar: str, low: float, high: float, help: str) -> Any:
    def checked(value: float | None) -> float | None:
        if value is not None:
            check_range(name, value, low, high)
        return value

    return typer.Option(name, metavar=metavar, help=help, callback=checked)


Traces = Annotated[
    list[str],
    typer.Argument(
        metavar="TRACE",
        help="Files of seqmoe trace, routing tables in CSV, delta-coded .npy; or qwen3.",
        show_default=False,
    ),
]
Pools = Annotated[
    str,
    typer.Option(
        "--pool", metavar="LIST", help=f"Pool sizes: all, 45%, 2GiB or 64slots; {_LISTED}"
    ),
]
Policies = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="LIST",
        help="Eviction: lru, decayed, s3fifo, forecast; window and belady know the future.",
    ),
]
Prefetches = Annotated[
    str,
    typer.Option(
        "--prefetch", metavar="LIST", help="Copies before use: off, lookahead, full or oracle."
    ),
]
PrefetchBy = Annotated[
    str,
    typer.Option(
        "--prefetch-by",
        metavar="gpu|thread",
        help="What copies ahead: GPU kernels that pause for fetches, or a host thread by DMA.",
    ),
]
Forecast = Annotated[
    str,
    typer.Option(
        "--forecast",
        metavar="NAME",
        help="none, persistence, popularity, decayed, blurred (truth with errors), predictor.",
    ),
]
Predictor = Annotated[
    str | None,
    flag(
        "--predictor",
        metavar="MODEL|FILE",
        help="A trained predictor: a packed model or a file.",
    ),
]
Recall = Annotated[
    str,
    typer.Option(
        "--recall", metavar="LIST", help="Recall of the blurred forecast in steps 1, 2, 3-4, 5-8."
    ),
]
Precision = Annotated[
    str | None,
    flag(
        "--precision",
        metavar="LIST",
        help="Its precision in the same steps; recall * K / (K + 3) if not given.",
    ),
]
Rare = Annotated[
    float, _number("--rare", "X", 0.01, 1, "Factor on both for experts unused in 64 tokens.")
]
LookAhead = Annotated[
    str,
    typer.Option(
        "--look-ahead",
        metavar="LIST",
        help="Recall of misses/precision of copies, for 1, 2, ... layers ahead.",
    ),
]
Window = Annotated[
    int, _number("--window", "N", 1, MAX_TOKENS, "Tokens that the policy window sees.")
]
HalfLife = Annotated[
    float, _number("--half-life", "N", 0.1, 1e4, "Tokens after which a past use counts half.")
]
Discount = Annotated[
    float,
    _number("--discount", "N", 0.1, 1e4, "Tokens ahead at which an expected use counts half."),
]
Skip = Annotated[
    int, _number("--skip", "N", 0, MAX_TOKENS, "Tokens at the start that are not counted.")
]
Tokens = Annotated[
    int | None, flag("--tokens", metavar="N", help="Replay the first N tokens only.")
]
Prompts = Annotated[bool, flag("--prompts", help="Replay tokens of prompts too, one by one.")]
Record = Annotated[int, _number("--record-bytes", "N", 1, 2**40, "Bytes of an expert.")]
Step = Annotated[
    float, _number("--step-ms", "MS", 1e-3, 1e6, "Time of a token that misses nothing.")
]
Fetch = Annotated[float, _number("--fetch-gb", "GB", 1e-3, 1e6, "GB/s of a fetch.")]
Dma = Annotated[
    float | None,
    _number("--dma-gb", "GB", 1e-3, 1e6, "GB/s of a prefetch by thread; 52 if not given."),
]
Launch = Annotated[float, _number("--launch-us", "US", 0, 1e6, "Time until a fetch moves bytes.")]
Delay = Annotated[
    float | None,
    _number(
        "--delay-us", "US", 0, 1e6, "Time from a request to its copy; 12 by gpu, 40 by thread."
    ),
]
Least = Annotated[float, _number("--least", "P", 0, 1, "Prefetch nothing less probable than this.")]
Budget = Annotated[int, _number("--budget", "N", 0, MAX_TOKENS, "Most prefetches in a token.")]
InFlight = Annotated[int, _number("--in-flight", "N", 1, 64, "Most prefetches under way.")]
Every = Annotated[int, _number("--every", "N", 1, 1024, "Request after every Nth layer.")]
Slack = Annotated[
    float | None,
    _number("--slack", "X", 0, 1, "How late a copy by thread may be, in fetches; 0 if not given."),
]
Seed = Annotated[int, _number("--seed", "N", 0, 2**32, "Seed of everything blurred.")]
Output = Annotated[
    str, typer.Option("-o", "--output", metavar="|".join(FORMAT_NAMES), help="Output format.")
]


def run_command(command: Callable[..., None], name: str, argv: list[str] | None) -> int:
    """Run a command of the tool as seqmoe runs its own, and return the exit code."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command()(command)
    return run(app, name, argv)


def read_pool(word: str) -> PoolSize:
    size = PoolSize.parse(word)
    if size.kind == "auto":
        raise UsageError("--pool auto: there is no device to look at", "give a share, as in 45%")
    return size


def read_words(name: str, text: str, allowed: tuple[str, ...]) -> list[str]:
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


def read_shares(name: str, text: str) -> tuple[float, ...]:
    """One number for all four windows of a forecast, or one for each window."""
    shares = tuple(_share(name, word) for word in text.split(","))
    if len(shares) not in (1, 4):
        raise UsageError(f"{name} {text!r} has {len(shares)} numbers", "give one or four")
    return shares * (4 // len(shares))


def read_accuracy(text: str) -> tuple[tuple[float, float], ...]:
    """Recall and precision for each number of layers ahead."""
    pairs = []
    for word in text.split(","):
        recall, slash, precision = word.partition("/")
        if not slash:
            raise UsageError(f"--look-ahead {word!r} has no /", "write recall/precision: 0.75/0.68")
        pairs.append((_share("--look-ahead", recall), _share("--look-ahead", precision)))
    return tuple(pairs)


def read_predictor(source: str) -> StoredPredictor:
    """The predictor of a packed model, or one in a file."""
    import torch

    from seqmoe_cli.forecast.stored import open_predictor

    path = Path(source)
    return open_predictor(path if path.is_file() else find_model(source), torch.device("cpu"))
