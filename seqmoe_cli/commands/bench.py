"""seqmoe bench: flags -> the matrix of cases -> rows -> one of the output formats."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from seqmoe_cli.bench.shapes import SHAPES, find_shape
from seqmoe_cli.commands import options
from seqmoe_cli.commands.options import DEFAULTS, flag, shown
from seqmoe_cli.errors import UsageError
from seqmoe_cli.settings import POLICIES, PREFETCHES, check_range
from seqmoe_cli.terminal.progress import progress_bars, status_line
from seqmoe_cli.terminal.table import FORMAT_NAMES, PLAIN

if TYPE_CHECKING:
    from seqmoe_cli.bench.matrix import Case
    from seqmoe_cli.bench.recorded import RecordedRouting
    from seqmoe_cli.bench.session import Session
    from seqmoe_cli.bench.source import Source


def _list_option(*names: str, help: str) -> Any:
    return shown(*names[:-1], f"{names[-1]} LIST", help=f"{help}; several with commas.")


_Shape = Annotated[
    str | None,
    flag("--shape NAME", help=f"Measure random weights in a shape: {', '.join(SHAPES)}."),
]
_Trace = Annotated[
    str | None, flag("--trace FILE", help="Replay recorded routing: of a file, or qwen3.")
]
_Prompts = Annotated[
    str | None, flag("-p", "--n-prompt LIST", help="Prompt tokens, several with commas; else 512.")
]
_Gens = Annotated[
    str | None,
    flag(
        "-n",
        "--n-gen LIST",
        help="Tokens to generate, several with commas; else 128, or half the trace.",
    ),
]
_Depths = Annotated[
    str, _list_option("-d", "--n-depth", help="Tokens of context before those timed")
]
_Pools = Annotated[str, _list_option("--pool", help="Pool sizes: auto, all, 45%, 2GiB or 64slots")]
_Prefetches = Annotated[
    str,
    _list_option("--prefetch", help=f"Copies before they are needed: {', '.join(PREFETCHES)}"),
]
_Policies = Annotated[
    str, _list_option("--policy", help=f"Eviction policies: {', '.join(POLICIES)}")
]
_Predictor = Annotated[
    Path | None, flag("--predictor FILE", help="A predictor to take instead of the model's own.")
]
_Repetitions = Annotated[int, shown("-r", "--repetitions N", help="Timed runs for each row.")]
_Output = Annotated[str, shown("-o", f"--output {'|'.join(FORMAT_NAMES)}", help="Output format.")]
_PromptFile = Annotated[
    Path | None, flag("--prompt-file FILE", help="UTF-8 text to read instead of shipped fables.")
]
_NoWarmup = Annotated[
    bool, flag("--no-warmup", help="Run nothing untimed; there are no warm rows then.")
]


def bench(
    model: options.OptionalModel = None,
    shape: _Shape = None,
    trace: _Trace = None,
    prompts: _Prompts = None,
    gens: _Gens = None,
    depths: _Depths = "0",
    repetitions: _Repetitions = 5,
    pools: _Pools = DEFAULTS.pool.text,
    output: _Output = "md",
    prompt_file: _PromptFile = None,
    no_warmup: _NoWarmup = False,
    vram: options.VramOption = DEFAULTS.vram_gib,
    device: options.DeviceOption = DEFAULTS.device,
    dtype: options.DtypeOption = DEFAULTS.dtype,
    policies: _Policies = DEFAULTS.policy,
    verify: options.VerifyOption = DEFAULTS.verify,
    prefetches: _Prefetches = DEFAULTS.prefetch,
    prefetch_by: options.PrefetchByOption = DEFAULTS.prefetch_by,
    predictor: _Predictor = DEFAULTS.predictor,
) -> None:
    """Measure the speed of prompts (pp) and of generation (tg), with a cold and a warm pool.

    Where lists are given, every combination gets a row. A cold row empties the pool before every
    run; a warm row finds in it what the same tokens left there. Prompts are connected text;
    generation goes on from it with the model's own sampling settings and a fixed seed. The time of
    sampling counts, that of tokenising does not.

    --shape needs no model: random weights of full size are made in memory. --trace replays the
    routing of a real model: the pool starts empty, as many tokens are generated as the trace has,
    and the last -n of them are timed. A pool of all experts runs first, the others are compared
    with it. A trace has no hidden states, so --prefetch then simulates look-ahead. Do not replay a
    trace that a predictor has learned from. The policy lru is not combined with --prefetch full,
    which needs counts.
    """
    check_range("-r", repetitions, 1, 1000)
    options.check_choice("-o", output, FORMAT_NAMES)
    options.check_prefetch_by(prefetch_by, _words(prefetches))
    engines = [
        options.engine_options(
            pool=pool,
            vram=vram,
            device=device,
            dtype=dtype,
            verify=verify,
            policy=policy,
            prefetch=prefetch,
            prefetch_by=prefetch_by,
            predictor=predictor,
        )
        for pool in dict.fromkeys(pools.split(","))
        for policy, prefetch in _ways(policies, prefetches)
    ]
    _check_source(model, shape, prompt_file)
    routing, cases = _routing_and_cases(trace, prompts, gens, depths)

    from seqmoe_cli.bench.session import Session

    source = _source(model, shape, prompt_file)
    _run(Session.prepare(source, cases, engines, repetitions, not no_warmup, routing), output)


def _ways(policies: str, prefetches: str) -> list[tuple[str, str]]:
    """All policies with all kinds of prefetch; but where there are several, not the pair that is
    refused."""
    ways = list(product(_words(policies), _words(prefetches)))
    return [way for way in ways if way != ("lru", "full")] or ways


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",")))


def _check_source(model: str | None, shape: str | None, prompt_file: Path | None) -> None:
    names = ", ".join(SHAPES)
    if model is None and shape is None:
        raise UsageError("nothing to measure", f"give a MODEL, or --shape and one of: {names}")
    if model is not None and shape is not None:
        raise UsageError(f"--shape {shape} and MODEL {model} were both given", "leave one out")
    if shape is not None:
        find_shape(shape)
        if prompt_file is not None:
            raise UsageError(
                "--prompt-file cannot be read with --shape, which has no tokenizer", "leave it out"
            )


def _routing_and_cases(
    trace: str | None, prompts: str | None, gens: str | None, depths: str
) -> tuple[RecordedRouting | None, tuple[Case, ...]]:
    from seqmoe_cli.bench.matrix import make_cases, parse_counts

    num_depths = parse_counts("-d", depths)
    if trace is None:
        nums = (
            parse_counts("-p", "512" if prompts is None else prompts),
            parse_counts("-n", "128" if gens is None else gens),
        )
        return None, make_cases(*nums, num_depths)
    if prompts is not None:
        raise UsageError("-p cannot be used with --trace: prompts are not replayed", "leave it out")
    nums_gen = None if gens is None else parse_counts("-n", gens)

    from seqmoe_cli.bench.recorded import RecordedRouting

    routing = RecordedRouting.open(trace)
    return routing, routing.cases(nums_gen, num_depths)


def _source(model: str | None, shape: str | None, prompt_file: Path | None) -> Source:
    from seqmoe_cli.bench.source import packed_source, random_source
    from seqmoe_cli.text.files import read_text, shipped_text

    if shape is not None:
        return random_source(shape)
    text, name = shipped_text()
    if prompt_file is not None:
        text, name = read_text("--prompt-file", str(prompt_file)), str(prompt_file)
    return packed_source(options.find_model(model or ""), text, name)


def _run(session: Session, output: str) -> None:
    """Load the weights, then print rows as they come."""
    from contextlib import ExitStack

    from seqmoe_cli.bench.output import report

    with ExitStack() as stack:
        with progress_bars() as progress:
            loaded = stack.enter_context(session.source.loaded(session.setups[0].plan, progress))
        tell = stack.enter_context(status_line())
        rows = session.rows(loaded, tell)
        lines = report(rows, session.known) if output == "md" else PLAIN[output](rows)
        for line in lines:
            tell.clear()
            print(line, flush=True)
