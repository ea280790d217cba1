"""`seqmoe train`: a predictor of coming routing, out of a model's own text or recorded traces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seqmoe_cli.commands import options
from seqmoe_cli.commands.options import flag
from seqmoe_cli.errors import SeqmoeError, UsageError
from seqmoe_cli.settings import EngineOptions, check_range
from seqmoe_cli.terminal.progress import progress_bars, status_line
from seqmoe_cli.terminal.table import Column, markdown

if TYPE_CHECKING:
    import torch

    from seqmoe_cli.forecast.predictor import Predictor
    from seqmoe_cli.forecast.recall import Recall
    from seqmoe_cli.forecast.trace import Trace
    from seqmoe_cli.forecast.training import Plan, Progress
    from seqmoe_weights.packed import PackedModel

_Traces = Annotated[
    list[str] | None,
    flag("--trace", metavar="FILE", help="Learn from this trace; may be given several times."),
]
_Tokens = Annotated[
    int,
    typer.Option("--tokens", metavar="N", help="Tokens to write, without --trace."),
]
_Minutes = Annotated[
    float, typer.Option("--minutes", metavar="M", help="Most minutes of training.")
]
_Passes = Annotated[int, typer.Option("--passes", metavar="N", help="Most passes over the tokens.")]
_Width = Annotated[int, typer.Option("--width", metavar="D", help="Width of the recurrent blocks.")]
_Checkpoint = Annotated[
    Path | None,
    flag(
        "--checkpoint",
        metavar="FILE",
        help="Save the training there, up to 0.5 GB, or go on from it.",
    ),
]
_Record = Annotated[
    Path | None,
    flag("--record", metavar="OUT", help="Keep the trace of what the model wrote."),
]
_HeldOut = Annotated[
    Path | None,
    flag("--held-out", metavar="OUT", help="Keep the trace that is held out."),
]
_Output = Annotated[
    Path | None,
    flag("-o", "--output", metavar="OUT", help="Write the predictor there, not into MODEL."),
]


@options.grouped
def train(
    model: options.OptionalModel = None,
    trace: _Traces = None,
    tokens: _Tokens = 200_000,
    minutes: _Minutes = 10.0,
    passes: _Passes = 40,
    width: _Width = 768,
    checkpoint: _Checkpoint = None,
    record: _Record = None,
    held_out: _HeldOut = None,
    output: _Output = None,
    as_json: options.JsonOption = False,
    ctx_size: options.CtxOption = 2048,
    seed: options.SeedOption = 0,
    place: options.PlaceFlags = options.PLACE,
) -> None:
    """Train the predictor of a model: which experts the next tokens will use.

    MODEL writes conversations, both questions and answers, and its routing is recorded; or traces
    are given. A tenth of the conversations is held out. A table shows what share of their routing
    the predictor foresees, beside what counting can do. The predictor is stored in
    MODEL.
    """
    settings = place.options(ctx_size=ctx_size)
    check_range("--tokens", tokens, 1000, options.MAX_TOKENS)
    check_range("--minutes", minutes, 0.01, 10_000)
    if seed is not None:
        check_range("--seed", seed, 0, 2**63 - 1)
    check_range("--passes", passes, 1, 10_000)
    check_range("--width", width, 16, 4096)
    if width % 16:
        raise UsageError(f"--width {width} is no multiple of 16", f"use {width // 16 * 16}")
    if model is None and not (trace and output):
        raise UsageError("no MODEL is given", "give one, or both --trace and -o")
    files = {"-o": output, "--record": record, "--held-out": held_out, "--checkpoint": checkpoint}
    for name, path in files.items():
        if path is not None:
            options.check_output(name, path)
    from seqmoe_cli.engine.device import choose_placement
    from seqmoe_cli.forecast.corpus import divide, joined
    from seqmoe_cli.forecast.shipped import open_trace
    from seqmoe_weights.packed import PackedModel

    packed = PackedModel.open(options.find_model(model)) if model else None
    device = choose_placement(settings).device
    if trace:
        whole = joined([open_trace(name) for name in trace])
    else:
        whole = _own_text(packed, settings, tokens, seed or 0)
    if record:
        whole.save(record)
    learned, judged = divide(whole)
    if held_out:
        judged.save(held_out)
    predictor = _new_predictor(packed, whole, width, device)
    plan = _plan(minutes, passes, seed or 0, device)
    predictor, done = _train(predictor, packed, (learned, judged), plan, checkpoint)
    facts: dict[str, Any] = {
        "model": packed.name if packed else whole.model,
        "weights_sha256": packed.weights_sha256 if packed else whole.weights_sha256,
        "num_tokens": len(learned),
        "text": trace or [f"{packed.name if packed else ''}'s own text"],
        "passes": round(done.passes, 2),
    }
    _store(predictor, packed, output, facts)  # judging takes minutes, and may be interrupted
    found = _judge(predictor, learned, judged)
    num_bytes = _store(predictor, packed, output, facts | found.facts())
    if packed is not None and output is None and not trace:
        _note_uses(packed, learned)
    where = output or (packed.path if packed else "")
    _print(found, as_json, f"{where}: a predictor of {num_bytes:,} bytes", done)


def _own_text(packed: PackedModel | None, settings: EngineOptions, tokens: int, seed: int) -> Trace:
    """What the model says to itself, recorded."""
    from seqmoe_cli.chat.own_text import OwnText
    from seqmoe_cli.chat.template import ChatTemplate
    from seqmoe_cli.forecast.recorder import TraceRecorder
    from seqmoe_cli.text.sampling import SamplingSettings, checkpoint_settings
    from seqmoe_cli.text.tokenizer import Tokenizer

    assert packed is not None
    folder = packed.path
    template, tokenizer = ChatTemplate.open(folder), Tokenizer.open(folder)
    sampling = SamplingSettings({}, checkpoint_settings(folder)).params
    recorder = TraceRecorder(packed.name, packed.config, weights_sha256=packed.weights_sha256)
    with options.opened_engine(folder, settings) as engine, progress_bars() as tell:
        text = OwnText(engine, template, tokenizer, sampling)
        return text.trace(
            recorder, tokens, seed, lambda done: tell("own text", done, tokens, f"{done:,} tokens")
        )


def _new_predictor(
    packed: PackedModel | None, trace: Trace, width: int, place: torch.device
) -> Predictor:
    from seqmoe_cli.forecast.corpus import check_fits
    from seqmoe_cli.forecast.predictor import Predictor, PredictorShape

    vocab_size = 0 if trace.token_ids is None else int(trace.token_ids.max()) + 1
    if packed is not None:
        config = packed.config
        sizes = (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)
        check_fits(trace, sizes, config.vocab_size, f"{packed.name} has")
        if trace.weights_sha256 not in (None, packed.weights_sha256):
            raise SeqmoeError(
                f"the trace is of the weights of {trace.model}, which are not those of "
                f"{packed.name}",
                "give a trace of the same model",
            )
        vocab_size = config.vocab_size if vocab_size else 0
    shape = PredictorShape.fitting(
        num_layers=trace.num_layers,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        vocab_size=vocab_size,
        width=width,
    )
    return Predictor(shape, dropout=0.1).to(place)


def _plan(minutes: float, passes: int, seed: int, place: torch.device) -> Plan:
    """A GPU wants large batches; on a CPU a few tokens a batch learn more in the same time."""
    from seqmoe_cli.forecast.training import Plan

    if place.type == "cuda":
        return Plan(minutes, passes, seed=seed)
    return Plan(minutes, passes, rate=1.5e-3, batch_tokens=512, length=128, seed=seed)


def _train(
    predictor: Predictor,
    packed: PackedModel | None,
    parts: tuple[Trace, Trace],
    plan: Plan,
    checkpoint: Path | None,
) -> tuple[Predictor, Progress]:
    import torch

    from seqmoe_cli.forecast.beginning import begin
    from seqmoe_cli.forecast.corpus import Corpus
    from seqmoe_cli.forecast.stored import round_weights
    from seqmoe_cli.forecast.training import Training

    torch.manual_seed(plan.seed)
    learned, judged = (Corpus(part, predictor.base.device) for part in parts)
    if checkpoint is None or not checkpoint.exists():
        with status_line() as say:
            say("counting")
            embedding = None
            if packed is not None and predictor.shape.vocab_size:
                embedding = packed.load_embedding().to(predictor.base)
            begin(predictor, learned, embedding)
    training = Training(predictor, learned, judged, plan, checkpoint)
    with progress_bars() as tell:

        def told(now: Progress) -> None:
            text = f"pass {now.passes:.1f}, loss {now.loss:.4f}, held out {now.held_out_loss:.4f}"
            tell("training", now.share, 1, text)

        training.run(told)
    round_weights(predictor)  # what is judged is what is stored
    return predictor, training.progress()


def _judge(predictor: Predictor, learned: Trace, judged: Trace) -> Recall:
    from seqmoe_cli.forecast.recall import recall

    with progress_bars() as tell:
        return recall(
            learned,
            judged,
            predictor,
            lambda done, total: tell("recall", done, total, f"{done:,} tokens"),
        )


def _store(
    predictor: Predictor, packed: PackedModel | None, output: Path | None, facts: dict[str, Any]
) -> int:
    from seqmoe_cli.forecast.stored import StoredPredictor

    stored = StoredPredictor(predictor, facts)
    if output is not None:
        return stored.save(output)
    assert packed is not None
    stored.attach(packed.path)
    return predictor.shape.num_bytes


def _note_uses(packed: PackedModel, learned: Trace) -> None:
    """For the warm start of the model's pool, until the user's own answers are there for it."""
    from seqmoe_cli.forecast.profile import UseProfile

    profile = UseProfile.of(packed)
    if profile.num_answers:
        return
    profile.learn(learned)
    with suppress(SeqmoeError):  # chats learn it, too
        profile.save()


def _print(found: Recall, as_json: bool, stored: str, done: Progress) -> None:
    if as_json:
        scores = [{"forecast": name, "recall": found.shares[name]} for name in found.shares]
        facts = {"num_tokens": found.num_tokens, "top": list(found.top), "scores": scores}
        facts |= {"passes": done.passes, "tokens_seen": done.tokens, "loss": done.held_out_loss}
        print(json.dumps(facts, indent=2))
        return
    for line in _recall_table(found):
        print(line)
    print(f"\n{stored}")


def _recall_table(found: Recall) -> Iterator[str]:
    """Markdown, and what it means for the step that begins."""
    from seqmoe_cli.forecast.recall import COUNTS

    rows: list[dict[str, str]] = [
        {"forecast": name}
        | {steps: " / ".join(f"{100 * x:.1f}" for x in row) for steps, row in shares.items()}
        for name, shares in found.shares.items()
    ]
    top = "/".join(map(str, found.top))
    columns = [Column("forecast", "forecast", left=True)]
    columns += [Column(f"{steps}: @{top}", steps) for steps in found.shares[COUNTS]]
    yield from markdown(columns, rows)
    yield ""
    k, more, twice = found.top
    yield (
        f"{found.num_tokens:,} tokens of answers. Share of uses, in %, that are of the {k}, {more} "
        f"and {twice} experts of a layer named first."
    )
    own, counted = (found.shares[name]["step 1"][1] for name in ("predictor", COUNTS))
    yield (
        f"Step 1, @{more}: predictor {100 * own:.1f} %, "
        f"{own / max(counted, 1e-4):.2f} times decayed counts."
    )
