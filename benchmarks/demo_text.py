"""The demo model's greedy text in float32: 500 tokens, which a GPU must give like the CPU, step by
step and as one graph, at every pool size."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.stats import TurnStats
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_cli.text.tokenizer import Tokenizer
from seqmoe_weights.packed import PackedModel

CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPT = CHATML.format("Write a long story about a fox who wants to see the sea.")
NUM_TOKENS = 500
GREEDY = SamplingParams(temperature=0, repeat_penalty=1.1)  # without it the tale goes in circles
WAYS = ("cpu", "eager", "graph")
THREADS = 2  # of torch in each process


class Run(NamedTuple):
    """One of the `WAYS` to decode, at one pool size."""

    way: str
    pool: str
    verify: bool = False


class Answer(NamedTuple):
    """Token ids, and how many lookups of the decode steps had to fetch."""

    token_ids: list[int]
    hits: int
    misses: int


def compare(model: Path, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """The same answer in every way at every pool size, stop tokens or not; raises when they differ.
    Without a GPU only the CPU's. The runs share the cores, so nothing is timed."""
    top_k = PackedModel.open(model).config.num_experts_per_tok
    ways = WAYS if torch.cuda.is_available() else WAYS[:1]
    smallest = f"{top_k}slots"
    runs = [Run(way, pool) for way in ways for pool in (smallest, "25%", "45%", "all")]
    runs.append(Run(ways[-1], smallest, verify=True))
    workers = max(1, (os.cpu_count() or 1) // THREADS)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as processes:
        jobs = [processes.submit(answer, model, run, num_tokens) for run in runs]
        answers = [job.result() for job in jobs]
    reference = answers[0]
    for run, given in zip(runs, answers, strict=True):
        if given.token_ids != reference.token_ids:
            raise AssertionError(_difference(run, given.token_ids, reference.token_ids))
    return {
        "model": model.name,
        "tokens": num_tokens,
        "repeat_penalty": GREEDY.repeat_penalty,
        "distinct_tokens": len(set(reference.token_ids)),
        "runs": [
            {**run._asdict(), "hits": given.hits, "misses": given.misses}
            for run, given in zip(runs, answers, strict=True)
        ],
        "text": Tokenizer.open(model).decode(reference.token_ids),
    }


def answer(model: Path, run: Run, num_tokens: int) -> Answer:
    """Runs in a process of its own."""
    torch.set_num_threads(THREADS)
    device = "cpu" if run.way == "cpu" else "cuda"
    options = EngineOptions(
        PoolSize.parse(run.pool), device, "float32", ctx_size=1024, verify=run.verify
    )
    engine = Engine.open(model, options, eager=run.way == "eager")
    turn, token_ids = TurnStats(), []
    prompt_ids = Tokenizer.open(model).encode(PROMPT)
    for step in engine.generate(prompt_ids, GREEDY, max_tokens=num_tokens):
        turn.add(step)
        assert step.token_id is not None  # nothing ends it but the count
        token_ids.append(step.token_id)
    engine.close()
    return Answer(token_ids, turn.decode.hits, turn.decode.misses)


def _difference(run: Run, ids: list[int], reference: list[int]) -> str:
    pairs = zip(ids, reference, strict=True)
    at = next(n for n, (ours, theirs) in enumerate(pairs) if ours != theirs)
    return f"{run} differs at token {at}: {ids[at:][:5]}, not {reference[at:][:5]}"
