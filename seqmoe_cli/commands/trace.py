"""`seqmoe trace`: answers prompts and writes down which experts every token used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from seqmoe_cli.commands import options
from seqmoe_cli.commands.options import flag, shown
from seqmoe_cli.settings import check_range
from seqmoe_cli.terminal.progress import note, status_line


@options.grouped
def trace(
    model: options.ModelArgument,
    prompts: Annotated[
        str, shown("--prompts FILE", help="JSON list of prompts; a .jsonl has one a line.")
    ],
    output: Annotated[Path, shown("-o", "--output OUT", help="The file to write.")],
    predict: options.PredictOption = None,
    hidden: Annotated[
        int | None, flag("--hidden R", help="Keep final hidden states, projected to R dimensions.")
    ] = None,
    weights: Annotated[bool, flag("--weights", help="Keep the routing weights.")] = False,
    ctx_size: options.CtxOption = options.DEFAULTS.ctx_size,
    sampling: options.SamplingFlags = options.SAMPLING,
    think: options.ThinkOption = "auto",
    place: options.PlaceFlags = options.PLACE,
) -> None:
    """Record which experts a model uses while it answers.

    A prompt is a text, a list of texts (turns of one conversation, answered one by one), or a list
    of messages with role and content. Every answer is a sequence of its own in OUT: the tokens of
    its whole prompt and its own, each with its experts in every layer. The answers are those of
    seqmoe chat; they and OUT are the same each time, as --seed is 0 if not given, and one more for
    each answer.
    """
    from seqmoe_cli.chat.prompt import read_prompts
    from seqmoe_cli.chat.recording import Interview
    from seqmoe_cli.chat.template import THINK_CHOICES, ChatTemplate
    from seqmoe_cli.forecast.recorder import TraceRecorder
    from seqmoe_cli.text.sampling import SamplingSettings, checkpoint_settings
    from seqmoe_cli.text.tokenizer import Tokenizer
    from seqmoe_weights.packed import PackedModel

    knobs = sampling.checked()
    options.check_predict(predict)
    if hidden is not None:
        check_range("--hidden", hidden, 1, 2**16)
    options.check_choice("--think", think, THINK_CHOICES)
    settings = place.options(ctx_size=ctx_size)
    conversations = read_prompts("--prompts", prompts)
    options.check_output("-o", output)
    folder = options.find_model(model)
    packed = PackedModel.open(folder)
    config = packed.config
    options.check_hidden(hidden or 0, packed)
    interview = Interview(
        ChatTemplate.open(folder),
        Tokenizer.open(folder),
        SamplingSettings({"seed": 0} | knobs, checkpoint_settings(folder)).params,
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
