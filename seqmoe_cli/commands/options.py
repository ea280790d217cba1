"""Arguments that several commands share, and the way they find a model and open the engine."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
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


def flag(*names: str, help: str, metavar: str | None = None, shown: bool = False) -> Any:
    """A flag, for typer; the name of its value may follow the last name: `--prompt TEXT`."""
    last, _, value = names[-1].partition(" ")
    names = *names[:-1], last
    return typer.Option(*names, help=help, metavar=value or metavar, show_default=shown)


def shown(*names: str, help: str) -> Any:
    """A flag whose default the help shows."""
    return flag(*names, help=help, shown=True)


def choice(name: str, allowed: tuple[str, ...], help: str) -> Any:
    """A flag that takes one of some words; see `check_choice`."""
    return flag(f"{name} {'|'.join(allowed)}", help=help, shown=True)


_MODEL = typer.Argument(
    metavar="MODEL",
    help="Folder of a packed model, or its name under the models folder.",
    show_default=False,
)
_Int = int | None
_Float = float | None
ModelArgument = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]
JsonOption = Annotated[bool, flag("--json", help="Print one JSON object.")]
VramOption = Annotated[
    float | None, flag("--vram GIB", help="Device memory to plan with; default: all that is free.")
]
DeviceOption = Annotated[str, choice("--device", DEVICES, "Device to compute on.")]
DtypeOption = Annotated[str, choice("--dtype", DTYPES, "Number format of the computation.")]
CtxOption = Annotated[
    int, shown("-c", "--ctx-size N", help="Context in tokens, at most the model's own.")
]
VerifyOption = Annotated[
    bool, flag("--verify", help="Check on the device that every expert read is the one asked for.")
]
PrefetchByOption = Annotated[
    str,
    choice(
        "--prefetch-by",
        PREFETCHERS,
        "What copies experts ahead: a kernel on the GPU, or a thread of the host.",
    ),
]
PredictOption = Annotated[int | None, flag("-n", "--predict N", help="Most tokens of an answer.")]
SeedOption = Annotated[int | None, flag("--seed N", help="Makes the choice of tokens repeatable.")]
ThinkOption = Annotated[str, flag("--think auto|on|off", help="Whether the model thinks first.")]


@dataclass(frozen=True)
class PlaceFlags:
    """Where a model runs, and with how much memory for experts."""

    pool: Annotated[
        str,
        shown("--pool SIZE", help="Device memory for experts: auto, all, 45%, 2GiB or 64slots."),
    ] = DEFAULTS.pool.text
    vram: VramOption = DEFAULTS.vram_gib
    device: DeviceOption = DEFAULTS.device
    dtype: DtypeOption = DEFAULTS.dtype

    def options(self, **more: Any) -> EngineOptions:
        """These flags and `more` of them, checked; raises `UsageError` naming the flag."""
        return engine_options(**vars(self), **more)


@dataclass(frozen=True)
class PoolFlags:
    """Which experts leave the pool, and which are copied into it beforehand."""

    policy: Annotated[
        str,
        choice(
            "--policy",
            POLICIES,
            "Eviction policy: evict the expert unused for longest (lru), used least often lately "
            "(decayed), or least expected to be used (forecast).",
        ),
    ] = DEFAULTS.policy
    prefetch: Annotated[
        str,
        choice(
            "--prefetch",
            PREFETCHES,
            "Copy experts before they are needed: those that the routers of later layers name "
            "(lookahead), and those that a predictor expects (full).",
        ),
    ] = DEFAULTS.prefetch
    prefetch_by: PrefetchByOption = DEFAULTS.prefetch_by


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are chosen; None where the model's own setting is to be taken."""

    temp: Annotated[_Float, flag("--temp T", help="Temperature; 0 takes the likeliest token.")] = (
        None
    )
    top_k: Annotated[_Int, flag("--top-k K", help="Choose among the K likeliest; 0 is all.")] = None
    top_p: Annotated[
        _Float, flag("--top-p P", help="Choose among the likeliest that make up this share.")
    ] = None
    min_p: Annotated[
        _Float,
        flag("--min-p P", help="Leave out tokens less likely than this share of the likeliest."),
    ] = None
    repeat_penalty: Annotated[
        _Float, flag("--repeat-penalty X", help="Divide the score of tokens seen; 1 is off.")
    ] = None
    presence_penalty: Annotated[
        _Float,
        flag(
            "--presence-penalty X",
            help="Subtract from the score of tokens in the answer; 0 is off.",
        ),
    ] = None
    frequency_penalty: Annotated[
        _Float,
        flag(
            "--frequency-penalty X", help="The same for each time that a token was used; 0 is off."
        ),
    ] = None
    seed: SeedOption = None

    def checked(self) -> dict[str, int | float | None]:
        """By the names of the knobs; raises `UsageError` for one that is out of range."""
        from seqmoe_cli.text.sampling import check_flags

        values = {name.replace("_", "-"): value for name, value in vars(self).items()}
        check_flags(values)
        return values


PLACE, EXPERTS, SAMPLING = PlaceFlags(), PoolFlags(), SamplingFlags()
"""The groups when no flag of them is given."""
_GROUPS = (PlaceFlags, PoolFlags, SamplingFlags)


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command that gets flags in groups, as typer wants it: a parameter that is one of `_GROUPS`
    becomes the flags of that group, in its place."""
    signature = inspect.signature(command, eval_str=True)
    groups = {
        p.name: p.annotation for p in signature.parameters.values() if p.annotation in _GROUPS
    }
    flags: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        group = groups.get(name)
        inside = inspect.signature(group, eval_str=True).parameters if group else {name: parameter}
        flags += inside.values()

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    ordered = [flag.replace(kind=keyword) for flag in flags]
    run.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
    return run


def engine_options(
    *, pool: str, vram: float | None = DEFAULTS.vram_gib, **more: Any
) -> EngineOptions:
    """The fields of `EngineOptions` as typed; raises `UsageError` naming the flag."""
    options = EngineOptions(PoolSize.parse(pool), vram_gib=vram, **more)
    check_choice("--device", options.device, DEVICES)
    check_choice("--dtype", options.dtype, DTYPES)
    check_choice("--policy", options.policy, POLICIES)
    check_choice("--prefetch", options.prefetch, PREFETCHES)
    check_choice("--prefetch-by", options.prefetch_by, PREFETCHERS)
    check_range("--ctx-size", options.ctx_size, 1, MAX_TOKENS)
    if vram is not None:
        check_range("--vram", vram, 0.001, 100_000)
    if options.prefetch == "full" and options.policy == "lru":
        raise UsageError(
            "--prefetch full needs counts of uses, and the policy lru counts none",
            "add --policy decayed or --policy forecast",
        )
    return options


def check_prefetch_by(prefetch_by: str, prefetches: Sequence[str]) -> None:
    """Raise `UsageError` when it says what copies ahead, and nothing is copied ahead."""
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


def check_predict(predict: int | None) -> None:
    """Raise `UsageError` for a -n that is out of range."""
    if predict is not None:
        check_range("--predict", predict, 1, MAX_TOKENS)


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
