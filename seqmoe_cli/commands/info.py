"""seqmoe info: what a packed model consists of, and how its memory is divided on this machine.

Loads no weights. The text for people is made from the same facts that `--json` prints.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from seqmoe_cli.commands import options
from seqmoe_cli.errors import PackedModelError, PromptError, ResourceError, SeqmoeError
from seqmoe_cli.settings import EngineOptions
from seqmoe_cli.terminal.console import make_console
from seqmoe_cli.terminal.progress import progress_bars
from seqmoe_weights.files import readable_size as size

if TYPE_CHECKING:
    from seqmoe_weights.packed import PackedModel

Facts = dict[str, Any]
Rows = list[tuple[str, ...]]
_SIZES = ("ctx_size", "num_slots", "resident_bytes", "kv_bytes", "workspace_bytes", "pool_bytes",
          "budget_bytes")  # fmt: skip
POOLED_REASON = "a token uses few of them: all are in host memory, those in use in slots"
RESIDENT_REASON = "every token uses them: on the device from start to end, outside the pool"
RECORD_REASON = "the same on disk, in host memory and in a slot"


@options.grouped
def info(
    model: options.ModelArgument,
    as_json: options.JsonOption = False,
    verify: Annotated[
        bool, options.flag("--verify", help="Read every file and check its hashes.")
    ] = False,
    ctx_size: options.CtxOption = options.DEFAULTS.ctx_size,
    place: options.PlaceFlags = options.PLACE,
) -> None:
    """Show what is resident, what is pooled, the expert record and the memory plan.

    Nothing is loaded. Exits with 1 when the model is unfinished or damaged, when its predictor is,
    or when the plan does not fit this machine; in the last two cases the rest is printed all the
    same.
    """
    settings = place.options(ctx_size=ctx_size)
    from seqmoe_cli.forecast.stored import predictor_facts
    from seqmoe_weights.packed import PackedModel

    packed = PackedModel.open(options.find_model(model))
    if verify:
        with progress_bars() as report:
            packed.verify(lambda done, total: report("check", done, total))
    facts = model_facts(packed) | {"verified": verify}
    refusal: SeqmoeError | None = None
    try:
        facts["predictor"] = predictor_facts(packed)
    except PackedModelError as error:
        facts["predictor"] = {"problem": error.message}
        refusal = error
    try:
        facts["plan"] = plan_facts(packed, settings)
    except ResourceError as error:
        facts["plan"] = None
        refusal = error
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        show(facts)
    if refusal is not None:
        raise refusal


def model_facts(packed: PackedModel) -> Facts:
    """What is true of the model on any machine."""
    from seqmoe_cli.bench.inventory import count_params, resident_groups
    from seqmoe_weights.layout import format_text

    config, params = packed.config, count_params(packed.config)
    record_bytes = packed.record_bytes
    return {
        "name": packed.name,
        "path": str(packed.path.resolve()),
        "family": config.family,
        "num_layers": config.num_hidden_layers,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "vocab_size": config.vocab_size,
        "max_ctx_size": config.max_position_embeddings,
        "params": params.total,
        "active_params": params.active,
        "size_bytes": packed.num_bytes,
        "format_version": packed.manifest["format_version"],
        "quantize": packed.manifest["quantize"],
        "expert_dtype": format_text(packed.layouts),
        "pooled": {
            "num_experts": config.num_routed_experts,
            "bytes": packed.records_bytes,
            "reason": POOLED_REASON,
        },
        "resident": {
            "groups": [asdict(group) for group in resident_groups(packed)],
            "bytes": packed.resident_bytes,
            "reason": RESIDENT_REASON,
        },
        "record": {
            "bytes": record_bytes,
            "parts": [asdict(part) | {"bytes": part.num_bytes} for part in packed.layouts[0].parts],
        },
        "generation": generation_facts(packed.path),
    }


def generation_facts(folder: Path) -> Facts:
    """Sampling settings with their origin, what ends an answer, and whether chat is possible."""
    from seqmoe_cli.chat.template import ChatTemplate
    from seqmoe_cli.text.sampling import SamplingSettings, checkpoint_settings
    from seqmoe_cli.text.tokenizer import Tokenizer

    try:
        template: str | None = Path(ChatTemplate.open(folder).where).name
    except PromptError:
        template = None
    settings = SamplingSettings({}, checkpoint_settings(folder))
    return {
        "settings": {name: asdict(setting) for name, setting in settings.settings.items()},
        "stop_ids": sorted(Tokenizer.open(folder).stop_ids),
        "chat_template": template,
    }


def plan_facts(packed: PackedModel, settings: EngineOptions) -> Facts:
    """The memory plan on this machine; raises `ResourceError` when it does not fit."""
    from seqmoe_cli.engine.memory import plan_memory

    plan = plan_memory(packed, settings, packed.predictor is not None)
    return {
        "device": plan.device.type,
        "dtype": str(plan.dtype).removeprefix("torch."),
        **{name: getattr(plan, name) for name in _SIZES},
        "lines": [asdict(line) for line in plan.lines],
        "fallbacks": list(plan.fallbacks),
    }


def show(facts: Facts) -> None:
    """Print the facts for people: a heading and aligned rows for each section."""
    from rich.text import Text

    console = make_console(sys.stdout)
    for index, (heading, rows) in enumerate(sections(facts)):
        console.print(Text("\n" * bool(index) + heading, style="bold"), soft_wrap=True)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            console.print(Text(("  " + "  ".join(cells)).rstrip()), soft_wrap=True)


def sections(facts: Facts) -> list[tuple[str, Rows]]:
    """(heading, rows of cells) in the order in which they are shown."""
    pooled, resident, record = facts["pooled"], facts["resident"], facts["record"]
    records = f"{pooled['num_experts']:,} records of {record['bytes']:,} bytes"
    found: list[tuple[str, Rows]] = [
        (facts["name"], _model_rows(facts)),
        (
            f"Pooled, {size(pooled['bytes'])}: {pooled['reason']}",
            [("routed experts", records)],
        ),
        (
            f"Resident, {size(resident['bytes'])}: {resident['reason']}",
            [_group_row(**group) for group in resident["groups"]],
        ),
        (
            f"Record of one expert, {record['bytes']:,} bytes: {RECORD_REASON}",
            [_part_row(**part) for part in record["parts"]],
        ),
        ("Generation", _generation_rows(**facts["generation"])),
    ]
    if facts["predictor"] is not None:
        found.append(("Predictor", _predictor_rows(facts["predictor"])))
    plan = facts["plan"]
    if plan is not None:
        rows: Rows = [(line["name"], size(line["bytes"]), line["reason"]) for line in plan["lines"]]
        rows += [("note", "", fallback) for fallback in plan["fallbacks"]]
        found.append((f"Memory plan on this machine ({plan['device']}, {plan['dtype']})", rows))
    return found


def _model_rows(facts: Facts) -> Rows:
    from seqmoe_cli.bench.inventory import readable_count as count

    experts = f"{facts['num_layers']} layers of {facts['num_experts']}"
    used = f"{facts['num_experts_per_tok']} used by a token"
    rows: Rows = [
        ("family", facts["family"]),
        ("experts", f"{experts}, {used}, {facts['expert_dtype']}"),
        ("params", f"{count(facts['params'])}, {count(facts['active_params'])} used by a token"),
        ("size", size(facts["size_bytes"])),
        ("context", f"{facts['max_ctx_size']:,} tokens at most"),
        ("format", f"{facts['format_version']}, converted with --quantize {facts['quantize']}"),
        ("folder", facts["path"]),
    ]
    if facts["verified"]:
        rows.append(("verified", "every hash is right"))
    return rows


def _group_row(name: str, tensors: int, bytes: int, dtypes: list[str]) -> tuple[str, ...]:
    count = f"{tensors:,} tensor{'' if tensors == 1 else 's'}"
    return name, size(bytes), count, ", ".join(dtypes)


def _part_row(name: str, dtype: str, shape: list[int], offset: int, bytes: int) -> tuple[str, ...]:
    return name, dtype, " x ".join(map(str, shape)), f"at {offset:,}", f"{bytes:,} bytes"


def _generation_rows(settings: Facts, stop_ids: list[int], chat_template: str | None) -> Rows:
    rows: Rows = [
        (name, "random" if setting["value"] is None else str(setting["value"]), setting["origin"])
        for name, setting in settings.items()
    ]
    ids = ", ".join(map(str, stop_ids)) or "none"
    only_raw = "" if chat_template else "only --raw can be used"
    return [
        *rows,
        ("stop ids", ids, "tokens that end an answer"),
        ("template", chat_template or "none", only_raw),
    ]


def _predictor_rows(predictor: Facts) -> Rows:
    if "problem" in predictor:
        return [("not usable", predictor["problem"])]
    shape = predictor["shape"]
    rows: Rows = [
        ("size", size(predictor["bytes"]), f"width {shape['width']}"),
        ("trained on", f"{predictor['num_tokens']:,} tokens", f"{predictor['passes']:g} passes"),
    ]
    if "recall" not in predictor:
        return [*rows, ("recall", "", "not judged: the training was interrupted then")]
    named = f"among {predictor['top'][1]} of a layer"
    recall = predictor["recall"]["predictor"]
    return rows + [
        (f"recall, {steps}", f"{100 * shares[1]:.1f} %", named) for steps, shares in recall.items()
    ]
