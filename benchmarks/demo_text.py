"""The demo model's greedy text in float32: the GPU must say what the CPU says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.tokenizer import Tokenizer
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams

PROMPTS = (
    "What is photosynthesis?",
    "Write a short story about a fox and a crow.",
    "Name three fruits that are red.",
)
CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
MAX_TOKENS = 120


def compare(model: Path) -> dict[str, Any]:
    """Greedy answers on the CPU, and on the GPU at two pool sizes; raises when they differ."""
    tokenizer = Tokenizer.open(model)
    answers: dict[str, list[list[int]]] = {}
    for device, pool in (("cpu", "all"), ("cuda", "all"), ("cuda", "45%")):
        engine = Engine.open(
            model, EngineOptions(PoolSize.parse(pool), device, "float32", ctx_size=1024)
        )
        answers[f"{device} {pool}"] = [_answer(engine, tokenizer, prompt) for prompt in PROMPTS]
        engine.close()
    reference = answers["cpu all"]
    for name, ids in answers.items():
        if ids != reference:
            raise AssertionError(f"{name} says something else than the CPU: {ids} {reference}")
    return {
        "model": model.name,
        "compared": list(answers),
        "tokens": sum(map(len, reference)),
        "text": tokenizer.decode(reference[0]),
    }


def _answer(engine: Engine, tokenizer: Tokenizer, prompt: str) -> list[int]:
    ids = tokenizer.encode(CHATML.format(prompt))
    steps = engine.generate(
        ids, SamplingParams(temperature=0), max_tokens=MAX_TOKENS, stop_ids=tokenizer.stop_ids
    )
    return [step.token_id for step in steps if step.token_id is not None]
