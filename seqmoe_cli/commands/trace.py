"""`seqmoe trace`: answers prompts and writes down which experts every token used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seqmoe_cli.commands import options
from seqmoe_cli.commands.options import flag
from seqmoe_cli.settings import check_range
from seqmoe_cli.terminal.progress import note, status_line

if TYPE_CHECKING:
    from seqmoe_cli.text.sampling import Value


def trace(
    model: options.ModelArgument,
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts", metavar="FILE", help="JSON list of prompts; a .jsonl has one a line."
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT", help="The file to write.")
    ],
    predict: options.PredictOption = None,
    hidden: Annotated[
        int | None,
        flag("--hidden", metavar="R", help="Keep final hidden states, projected to R dimensions."),
    ] = None,
    weights: Annotated[bool, flag("--weights", help="Keep the routing weights.")] = False,
    ctx_size: options.CtxOption = options.DEFAULTS.ctx_size,
    temp: options.TempOption = None,
    top_k: options.TopKOption = None,
    top_p: options.TopPOption = None,
    min_p: options.MinPOption = None,
    repeat_penalty: options.RepeatOption = None,
    presence_penalty: options.PresenceOption = None,
    frequency_penalty: options.FrequencyOption = None,
    seed: options.SeedOption = 0,
    think: options.ThinkOption = "auto",
    pool: options.PoolOption = options.DEFAULTS.pool.text,
    vram: options.VramOption = options.DEFAULTS.vram_gib,
    device: options.DeviceOption = options.DEFAULTS.device,
    dtype: options.DtypeOption = options.DEFAULTS.dtype,
) -> None:
    """Record which experts a model uses while it answers.

    A prompt is a text, a list of texts (turns of one conversation, answered one by one), or a list
    of messages with role and content. Every answer is a sequence of its own in OUT: the tokens of
    its whole prompt and its own, each with its experts in every layer. The answers are those of
    seqmoe chat; they and OUT are the same each time, as --seed is 0 if not given, and one more for
    each answer.
    """
    from seqmoe_cli.chat.prompt_file import read_prompts
    from seqmoe_cli.chat.recording import Interview
    from seqmoe_cli.chat.template import THINK_CHOICES, ChatTemplate
    from seqmoe_cli.forecast.recorder import TraceRecorder
    from seqmoe_cli.text.sampling import SamplingSettings, check_flags, checkpoint_settings
    from seqmoe_cli.text.tokenizer import Tokenizer
    from seqmoe_weights.packed import PackedModel

    sampling: dict[str, Value] = {
        "temp": temp,
        "top-k": top_k,
        "top-p": top_p,
        "min-p": min_p,
        "repeat-penalty": repeat_penalty,
        "presence-penalty": presence_penalty,
        "frequency-penalty": frequency_penalty,
        "seed": seed,
    }
    check_flags(sampling)
    if predict is not None:
        check_range("--predict", predict, 1, options.MAX_TOKENS)
    if hidden is not None:
        check_range("--hidden", hidden, 1, 2**16)
    options.check_choice("--think", think, THINK_CHOICES)
    settings = options.engine_options(
        pool=pool, vram=vram, device=device, dtype=dtype, ctx_size=ctx_size
    )
    conversations = read_prompts("--prompts", prompts)
    options.check_output("-o", output)
    folder = options.find_model(model)
    packed = PackedModel.open(folder)
    config = packed.config
    options.check_hidden(hidden or 0, packed)
    interview = Interview(
        ChatTemplate.open(folder),
        Tokenizer.open(folder),
        SamplingSettings(sampling, checkpoint_settings(folder)).params,
        min(ctx_size, config.max_position_embeddings),
        think,
        predict,
    )
    interview.check(conversations)
    recorder = TraceRecorder(
        packed.name,
        config,
        weights=weights,
        hidden_rank=hidden or 0,
        weights_sha256=packed.weights_sha256,
    )
    with options.opened_engine(folder, settings) as engine:
        note(*engine.fallbacks)
        with status_line() as tell:
            interview.record(engine, recorder, conversations, tell)
    num_bytes = recorder.trace().save(output)
    print(
        f"{output}: {recorder.num_tokens:,} tokens in {recorder.num_sequences:,} sequences, "
        f"{num_bytes:,} bytes"
    )
