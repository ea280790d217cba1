"""Arguments that several commands share, and the way they find a model and open the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seqmoe_cli import paths
from seqmoe_cli.errors import PackedModelError, SeqmoeError, UsageError, either
from seqmoe_cli.settings import (
    DEVICES,
    DTYPES,
    POLICIES,
    PREFETCHERS,
    PREFETCHES,
    EngineOptions,
    PoolSize,
    check_range,
)
from seqmoe_cli.terminal.progress import progress_bars

if TYPE_CHECKING:
    from seqmoe_cli.engine.engine import Engine
    from seqmoe_weights.packed import PackedModel

DEFAULTS = EngineOptions()
MAX_TOKENS = 10_000_000
"""No flag takes more tokens than this; far above any model's context."""


def flag(*names: str, help: str, metavar: str | None = None) -> Any:
    """A flag whose default the help does not show."""
    return typer.Option(*names, help=help, metavar=metavar, show_default=False)


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a packed model, or its name under the models folder.",
        show_default=False,
    ),
]
PoolOption = Annotated[
    str,
    typer.Option(
        "--pool",
        metavar="SIZE",
        help="Device memory for experts: auto, all, 45%, 2GiB or 64slots.",
    ),
]
VramOption = Annotated[
    float | None,
    typer.Option(
        "--vram",
        metavar="GIB",
        help="Device memory to plan with; all that is free if not given.",
        show_default=False,
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", metavar="|".join(DEVICES), help="Device.")]
DtypeOption = Annotated[
    str, typer.Option("--dtype", metavar="|".join(DTYPES), help="Type of the computation.")
]
CtxOption = Annotated[
    int,
    typer.Option(
        "-c", "--ctx-size", metavar="N", help="Context in tokens, at most the model's own."
    ),
]
VerifyOption = Annotated[
    bool, flag("--verify", help="Prove on the device that every expert read is the one asked for.")
]
PrefetchOption = Annotated[
    str,
    typer.Option(
        "--prefetch",
        metavar="|".join(PREFETCHES),
        help="Copy experts before they are wanted: what later routers name, or predictors too.",
    ),
]
PrefetchByOption = Annotated[
    str,
    typer.Option(
        "--prefetch-by",
        metavar="|".join(PREFETCHERS),
        help="Who copies ahead: the GPU beside its kernels, or a thread of the host.",
    ),
]

PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="|".join(POLICIES),
        help="Who leaves the pool: not used for longest, least often lately, or least expected.",
    ),
]
PredictOption = Annotated[
    int | None, flag("-n", "--predict", metavar="N", help="Most tokens of an answer.")
]
TempOption = Annotated[
    float | None, flag("--temp", metavar="T", help="Temperature; 0 takes the likeliest token.")
]
TopKOption = Annotated[
    int | None, flag("--top-k", metavar="K", help="Choose among the K likeliest; 0 is all.")
]
TopPOption = Annotated[
    float | None,
    flag("--top-p", metavar="P", help="Choose among the likeliest that make up this share."),
]
MinPOption = Annotated[
    float | None,
    flag("--min-p", metavar="P", help="Leave out what is rarer than this share of the likeliest."),
]
RepeatOption = Annotated[
    float | None,
    flag("--repeat-penalty", metavar="X", help="Divide the score of tokens seen; 1 is off."),
]
PresenceOption = Annotated[
    float | None,
    flag("--presence-penalty", metavar="X", help="Taken off tokens of the answer; 0 is off."),
]
FrequencyOption = Annotated[
    float | None,
    flag("--frequency-penalty", metavar="X", help="The same for each time one was used."),
]
SeedOption = Annotated[
    int | None, flag("--seed", metavar="N", help="Makes the choice of tokens repeatable.")
]
ThinkOption = Annotated[
    str, flag("--think", metavar="auto|on|off", help="Whether the model thinks first.")
]


def engine_options(
    *,
    pool: str = DEFAULTS.pool.text,
    vram: float | None = DEFAULTS.vram_gib,
    device: str = DEFAULTS.device,
    dtype: str = DEFAULTS.dtype,
    ctx_size: int = DEFAULTS.ctx_size,
    verify: bool = DEFAULTS.verify,
    policy: str = DEFAULTS.policy,
    prefetch: str = DEFAULTS.prefetch,
    prefetch_by: str = DEFAULTS.prefetch_by,
    predictor: Path | None = DEFAULTS.predictor,
) -> EngineOptions:
    """Check the flags of a command line; raises `UsageError` naming the flag."""
    check_choice("--device", device, DEVICES)
    check_choice("--dtype", dtype, DTYPES)
    check_choice("--policy", policy, POLICIES)
    check_choice("--prefetch", prefetch, PREFETCHES)
    check_choice("--prefetch-by", prefetch_by, PREFETCHERS)
    check_range("--ctx-size", ctx_size, 1, MAX_TOKENS)
    if vram is not None:
        check_range("--vram", vram, 0.001, 100_000)
    if prefetch == "full" and policy == "lru":
        raise UsageError(
            "--prefetch full lives on counts of uses, and the policy lru counts none",
            "add --policy decayed or --policy forecast",
        )
    size = PoolSize.parse(pool)
    placed = (size, device, dtype, ctx_size, vram, verify)
    return EngineOptions(*placed, policy, prefetch, prefetch_by, predictor)


def check_prefetch_by(prefetch_by: str, prefetches: Sequence[str]) -> None:
    """Raise `UsageError` when it says who copies ahead, and nobody does."""
    if prefetch_by != DEFAULTS.prefetch_by and all(kind == "off" for kind in prefetches):
        raise UsageError(
            f"--prefetch-by {prefetch_by} would do nothing: nothing is prefetched",
            "add --prefetch lookahead, or leave it out",
        )


def check_choice(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise `UsageError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise UsageError(f"{flag} {value!r} is not allowed", f"use {either(allowed)}")


def check_output(flag: str, path: Path) -> None:
    """Find out now, not after an hour of work, that a file cannot be written."""
    if path.exists() and not path.is_file():
        raise SeqmoeError(f"{flag} {path} is no file", "give the name of a file")
    if not os.access(path.parent, os.W_OK):
        raise SeqmoeError(f"{flag} {path}: nothing can be written there", "choose another folder")


def check_hidden(rank: int, packed: PackedModel) -> None:
    """Refuse to project a model's hidden states to more dimensions than they have."""
    if rank > packed.config.hidden_size:
        raise SeqmoeError(
            f"--hidden {rank}: the hidden states of {packed.name} have "
            f"{packed.config.hidden_size:,} dimensions",
            "use as many or fewer",
        )


def find_model(model: str) -> Path:
    """The folder that MODEL means; raises `PackedModelError` when there is none."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise PackedModelError(f"{model} is a file", "give the folder of a packed model")
    named = paths.models_dir() / model
    if model and named.is_dir():
        return named
    found = sorted(p.name for p in paths.models_dir().glob("*") if p.is_dir())
    hint = f"models there: {', '.join(found)}" if found else "make one with: seqmoe convert SRC"
    raise PackedModelError(f"no model {model!r}, here or in {paths.models_dir()}", hint)


@contextmanager
def opened_engine(folder: Path, options: EngineOptions) -> Iterator[Engine]:
    """The engine of a packed model, with a bar on stderr while it loads; closed at the end."""
    from seqmoe_cli.engine.engine import Engine

    with progress_bars() as progress:
        engine = Engine.open(folder, options, progress)
    try:
        yield engine
    finally:
        engine.close()
