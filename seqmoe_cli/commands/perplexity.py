"""seqmoe perplexity: how well a model predicts a text file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from seqmoe_cli.commands import options
from seqmoe_cli.errors import PromptError, UsageError
from seqmoe_cli.terminal.progress import note, status_line

if TYPE_CHECKING:
    from seqmoe_cli.bench.perplexity import Score
    from seqmoe_cli.engine.engine import Engine


@options.grouped
def perplexity(
    model: options.ModelArgument,
    file: Annotated[Path, options.shown("--file FILE", help="UTF-8 text, taken byte for byte.")],
    as_json: options.JsonOption = False,
    ctx_size: options.CtxOption = options.DEFAULTS.ctx_size,
    place: options.PlaceFlags = options.PLACE,
    verify: options.VerifyOption = options.DEFAULTS.verify,
) -> None:
    """Measure how well a model predicts a text.

    The text is taken as it is: no template, no added tokens. Each token but the first is predicted
    from all before it. A text longer than the context is cut into windows that overlap by one
    token: the first token of a window is the last of the one before, so that every token is
    predicted exactly once, from the tokens of its window.
    """
    if ctx_size < 2:
        raise UsageError(f"--ctx-size {ctx_size} leaves nothing to predict", "use 2 or more")
    settings = place.options(ctx_size=ctx_size, verify=verify)
    from seqmoe_cli.bench.perplexity import score
    from seqmoe_cli.text.files import read_text

    text = read_text("--file", str(file))
    folder = options.find_model(model)
    from seqmoe_cli.text.tokenizer import Tokenizer

    ids = Tokenizer.open(folder).encode(text)
    if len(ids) < 2:
        raise PromptError(
            f"{file} is too short: {len(ids)} token{'' if len(ids) == 1 else 's'}",
            "at least 2 are needed: the first one is given, the others are predicted",
        )
    with options.opened_engine(folder, settings) as engine, status_line() as tell:
        result = score(engine, ids, lambda done, total: tell(f"{done:,} of {total:,} tokens"))
        facts = _facts(result, engine)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    note(*facts["fallbacks"])
    print(
        f"perplexity {result.perplexity:.4f}  nll {result.nll_per_token:.6f} per token  "
        f"{result.tokens:,} tokens predicted"
    )


def _facts(result: Score, engine: Engine) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "tokens": result.tokens,
        "nll_per_token": result.nll_per_token,
        "perplexity": result.perplexity,
        "ctx_size": engine.ctx_size,
        "hit_rate": result.spent.hit_rate,
        "misses": result.spent.misses,
        "fetched_bytes": result.spent.fetched_bytes,
        "tokens_per_second": result.spent.tokens_per_second,
        "num_slots": engine.plan.num_slots,
        "pool_bytes": engine.plan.pool_bytes,
        "device": engine.device.type,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "verify": engine.pool.stamps is not None,
        "fallbacks": engine.fallbacks,
    }
