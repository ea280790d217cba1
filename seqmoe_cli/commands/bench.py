"""seqmoe bench: flags -> the matrix of cases -> rows -> one of the output formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seqmoe_cli.commands.options import (
    DEFAULTS,
    DeviceOption,
    DtypeOption,
    ModelArgument,
    VramOption,
    check_choice,
    engine_options,
    find_model,
    opened_engine,
)
from seqmoe_cli.commands.progress import StatusLine, status_line
from seqmoe_cli.errors import PromptError, UsageError
from seqmoe_cli.settings import EngineOptions, SamplingParams, check_range

if TYPE_CHECKING:
    from seqmoe_cli.bench.matrix import Case
    from seqmoe_cli.bench.measure import Plan
    from seqmoe_cli.bench.rows import Row, Setting
    from seqmoe_cli.engine.engine import Engine
    from seqmoe_weights.packed import PackedModel

FORMAT_NAMES = ("md", "csv", "json", "jsonl")


def _list_option(*names: str, help: str) -> Any:
    return typer.Option(*names, metavar="LIST", help=f"{help}; several with commas.")


_Prompts = Annotated[str, _list_option("-p", "--n-prompt", help="Tokens of the prompt")]
_Gens = Annotated[str, _list_option("-n", "--n-gen", help="Tokens to generate")]
_Depths = Annotated[str, _list_option("-d", "--n-depth", help="Tokens of context before them")]
_Pools = Annotated[str, _list_option("--pool", help="Pool sizes: auto, all, 45%, 2GiB or 64slots")]
_Repetitions = Annotated[
    int, typer.Option("-r", "--repetitions", metavar="N", help="Timed runs for each row.")
]
_Output = Annotated[
    str, typer.Option("-o", "--output", metavar="|".join(FORMAT_NAMES), help="Output format.")
]
_PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file",
        metavar="FILE",
        help="UTF-8 text to read instead of the fables shipped with seqmoe.",
        show_default=False,
    ),
]
_NoWarmup = Annotated[
    bool, typer.Option("--no-warmup", help="Run nothing untimed; leaves out the warm rows.")
]


def bench(
    model: ModelArgument,
    prompts: _Prompts = "512",
    gens: _Gens = "128",
    depths: _Depths = "0",
    repetitions: _Repetitions = 5,
    pools: _Pools = DEFAULTS.pool.text,
    output: _Output = "md",
    prompt_file: _PromptFile = None,
    no_warmup: _NoWarmup = False,
    vram: VramOption = DEFAULTS.vram_gib,
    device: DeviceOption = DEFAULTS.device,
    dtype: DtypeOption = DEFAULTS.dtype,
) -> None:
    """Measure the speed of prompts (pp) and of generation (tg), with a cold and a warm pool.

    Lists make the cross product. A cold row empties the pool before every run; a warm row finds in
    it what the same tokens left there. Prompts are connected text; generation goes on from it with
    the model's own sampling settings and a fixed seed. Sampling is inside the timed part,
    tokenising is not.
    """
    from seqmoe_cli.bench.matrix import make_cases, parse_counts

    cases = make_cases(
        parse_counts("-p", prompts), parse_counts("-n", gens), parse_counts("-d", depths)
    )
    check_range("-r", repetitions, 1, 1000)
    check_choice("-o", output, FORMAT_NAMES)
    ctx_size = max(case.ctx_size for case in cases)
    options = [
        engine_options(pool=pool, vram=vram, device=device, dtype=dtype, ctx_size=ctx_size)
        for pool in dict.fromkeys(pools.split(","))
    ]
    text, source = _prompt_text(prompt_file)
    packed = _open_checked(find_model(model), cases, options)
    plan = _make_plan(packed, cases, text, source, repetitions, not no_warmup)
    _run(packed, options, cases, plan, source, output)


def _prompt_text(prompt_file: Path | None) -> tuple[str, str]:
    """The text that the cases read, and the name that rows give it."""
    from seqmoe_cli.bench.text import read_text, shipped_text

    return (read_text(prompt_file), str(prompt_file)) if prompt_file else shipped_text()


def _open_checked(
    folder: Path, cases: Sequence[Case], options: Sequence[EngineOptions]
) -> PackedModel:
    """The model, once it is clear that every case and every pool size fits."""
    from seqmoe_cli.engine.memory import plan_memory
    from seqmoe_weights.packed import PackedModel

    packed = PackedModel.open(folder)
    most = packed.config.max_position_embeddings
    for case in cases:
        if case.ctx_size > most:
            raise UsageError(
                f"{case.name} needs a context of {case.ctx_size:,} tokens, the model has {most:,}",
                "lower -d, -p or -n",
            )
    for option in options:
        plan_memory(packed, option)
    return packed


def _make_plan(
    packed: PackedModel,
    cases: Sequence[Case],
    text: str,
    source: str,
    repetitions: int,
    warmup: bool,
) -> Plan:
    """Tokens and sampling of all cases: the model's own settings with a fixed seed."""
    from seqmoe_cli.bench.measure import Plan
    from seqmoe_cli.chat.sampling import SamplingSettings, checkpoint_settings
    from seqmoe_cli.engine.tokenizer import Tokenizer

    ids = Tokenizer.open(packed.path).encode(text)
    longest = max(cases, key=lambda case: case.text_tokens)
    if longest.text_tokens > len(ids):
        raise PromptError(
            f"{longest.name} reads {longest.text_tokens:,} tokens, {source} has {len(ids):,}",
            "give a longer text with --prompt-file, or lower -p or -d",
        )
    sampling = SamplingSettings({"seed": 0}, checkpoint_settings(packed.path)).params
    return Plan(ids, sampling, repetitions, warmup)


def _run(
    packed: PackedModel,
    options: Sequence[EngineOptions],
    cases: Sequence[Case],
    plan: Plan,
    source: str,
    output: str,
) -> None:
    """Measure pool size by pool size and print rows as they come."""
    from seqmoe_cli.bench.output import FORMATS

    with status_line() as tell:
        rows = (
            row
            for option in options
            for row in _rows_of_pool(packed, option, cases, plan, source, tell)
        )
        for line in FORMATS[output](rows):
            tell.clear()
            print(line, flush=True)


def _rows_of_pool(
    packed: PackedModel,
    options: EngineOptions,
    cases: Sequence[Case],
    plan: Plan,
    source: str,
    tell: StatusLine,
) -> Iterator[Row]:
    from seqmoe_cli.bench.measure import run_case
    from seqmoe_cli.bench.rows import make_row

    tell.clear()
    with opened_engine(packed.path, options) as engine:
        setting = _describe(packed, engine, options, plan.sampling, source)
        for case in cases:
            for state, samples in run_case(
                engine, case, plan, lambda text: tell(f"pool {options.pool.text}, {text}")
            ):
                now = datetime.now(UTC).isoformat(timespec="seconds")
                yield make_row(setting, case, state, now, samples)


def _describe(
    packed: PackedModel,
    engine: Engine,
    options: EngineOptions,
    sampling: SamplingParams,
    source: str,
) -> Setting:
    """What all rows of an opened engine share."""
    from seqmoe_cli.bench.inventory import count_params
    from seqmoe_cli.bench.machine import Machine
    from seqmoe_cli.bench.rows import Setting

    return Setting(
        model_filename=packed.name,
        model_type=f"{packed.config.family} {packed.layout['gate'].dtype}",
        model_size=packed.resident_bytes + packed.records_bytes,
        model_n_params=count_params(packed.config).total,
        device=engine.device.type,
        dtype=str(engine.dtype).removeprefix("torch."),
        pool=options.pool.text,
        pool_bytes=engine.plan.pool_bytes,
        num_slots=engine.plan.num_slots,
        n_ctx=engine.ctx_size,
        sampling=_sampling_text(sampling),
        prompt_source=source,
        fallbacks=engine.fallbacks,
        **asdict(Machine.inspect(engine.device.type)),
    )


def _sampling_text(params: SamplingParams) -> str:
    if params.temperature == 0:
        return "greedy"
    return (
        f"temperature {params.temperature:g}, top-k {params.top_k}, top-p {params.top_p:g}, "
        f"min-p {params.min_p:g}, seed {params.seed}"
    )
