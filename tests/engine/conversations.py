"""An engine that checks every copy, and a short conversation with it."""

from __future__ import annotations

from pathlib import Path

from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.stats import TurnStats
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams

SAMPLING = SamplingParams(temperature=1.0, seed=5)
PROMPT = [i * 7 % 200 for i in range(60)]
SHAPE = {"num_hidden_layers": 6, "num_experts": 12}  # of the model


def open_engine(
    packed: Path, device: str, pool: str = "30%", prefetch: str = "lookahead", **more: object
) -> Engine:
    options = EngineOptions(
        PoolSize.parse(pool),
        device,
        "float32",
        400,
        verify=True,
        prefetch=prefetch,
        prefetch_by=str(more.get("by", "auto")),
    )
    engine = Engine.open(packed, options, eager=bool(more.get("eager")))
    if engine.prefetch is not None:
        engine.prefetch.switch.is_held = True
    return engine


def say(engine: Engine, length: int = 25) -> tuple[list[int | None], TurnStats]:
    """Two turns of one conversation, the pool's state as it is."""
    engine.reset_kv()
    stats, tokens = TurnStats(), list[int | None]()
    for prompt in (PROMPT, [*PROMPT, 5, 6, 7]):
        for step in engine.generate(prompt, SAMPLING, max_tokens=length):
            tokens.append(step.token_id)
            stats.add(step)
    return tokens, stats
