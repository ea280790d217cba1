"""`seqmoe convert`: find the source, say what will be written, convert, name the chat command."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seqmoe_cli import paths
from seqmoe_cli.commands import options
from seqmoe_cli.errors import PromptError
from seqmoe_cli.terminal.progress import progress_bars

if TYPE_CHECKING:
    from seqmoe_weights.convert import Conversion

QUANTIZE = ("keep", "fp8")
_STARTS = {
    "new": "converting",
    "resume": "resuming an interrupted conversion",
    "check": "it is there already, checking it against the source",
}
_ENDS = {
    "converted": "converted",
    "repaired": "damaged or missing files were written again",
    "unchanged": "already converted, complete and equal",
}


def convert(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="Checkpoint folder, or a repo id that is in the Hugging Face cache.",
            show_default=False,
        ),
    ],
    dst: Annotated[
        Path | None,
        typer.Argument(
            metavar="DST",
            help="Folder for the packed model; one under the models folder if not given.",
            show_default=False,
        ),
    ] = None,
    quantize: Annotated[
        str,
        typer.Option(
            metavar="|".join(QUANTIZE),
            help="keep: the experts' bits as they are; fp8: round them to FP8, 128x128 blocks.",
        ),
    ] = "keep",
    force: Annotated[
        bool, options.flag("--force", help="Replace another packed model in DST.")
    ] = False,
) -> None:
    """Convert a Hugging Face checkpoint into a packed model.

    Nothing is downloaded. An interrupted conversion goes on when the same command is run again.
    """
    options.check_choice("--quantize", quantize, QUANTIZE)
    from seqmoe_weights.convert import Conversion
    from seqmoe_weights.hub import resolve_source

    source, name = resolve_source(src, paths.hf_cache_dir())
    target = dst if dst is not None else paths.models_dir() / name
    conversion = Conversion(source, target, quantize, force)
    _check_chat(source)
    _describe(conversion)
    try:
        with progress_bars() as report:
            outcome = conversion.run(lambda done, total: report("converting", done, total))
    except KeyboardInterrupt:
        _note(f"interrupted; run the same command again to go on from here: {target}")
        raise typer.Exit(130) from None
    _note(f"{_ENDS[outcome]}: {target}")
    print(f"seqmoe chat {shlex.quote(str(target))}")


def _check_chat(source: Path) -> None:
    """Refuse now what a chat would refuse later: tokenizer, sampling settings or chat template
    that cannot be used. A model without a template is no chat model, but can continue texts."""
    from seqmoe_cli.chat.template import ChatTemplate
    from seqmoe_cli.text.sampling import checkpoint_settings
    from seqmoe_cli.text.tokenizer import Tokenizer

    Tokenizer.open(source)
    checkpoint_settings(source)
    with suppress(PromptError):
        ChatTemplate.open(source)


def _describe(conversion: Conversion) -> None:
    """Sizes, free disk and quantisation, before anything is written."""
    from seqmoe_weights.files import readable_size
    from seqmoe_weights.layout import format_text

    config, packer = conversion.source.config, conversion.packer
    kept = "bits kept" if conversion.quantize == "keep" else "rounded to FP8"
    _note(f"source  {conversion.source.path}")
    _note(f"target  {conversion.destination.path} ({_STARTS[conversion.state]})")
    _note(
        f"model   {config.family}, {config.num_hidden_layers} layers of {config.num_experts} "
        f"experts, {format_text(packer.layouts)}, {kept}"
    )
    resident, experts, free = map(
        readable_size, (packer.resident_bytes, packer.records_bytes, conversion.free_bytes)
    )
    _note(f"size    {resident} resident + {experts} experts; {free} of disk free")


def _note(text: str) -> None:
    print(text, file=sys.stderr)
