"""Has the sparse demo model write conversations, many at a time, and writes down its routing.

python -m tools.demo_model.sparse.routes --tokens 2000000 --out FILE [--device cuda --compile]

The file is one of `seqmoe trace`. The routing is that of the masked dense form (`decoder.py`), and
that of the built model but for roundings.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from seqmoe_cli.forecast.recorder import PROJECTION_SEED, projection
from seqmoe_cli.forecast.trace import DECODE, PREFILL, Trace, expert_dtype
from tools.demo_model.source import packaged_gguf, read_gguf
from tools.demo_model.sparse.build import REPETITION_PENALTY, TOP_K, shipped_delta
from tools.demo_model.sparse.chat import Everyday, conversation_flow, openings, prompt_rows
from tools.demo_model.sparse.decoder import Decoder, dense_decoder, hidden_states
from tools.demo_model.sparse.sampler import Choice, Request, sample
from tools.demo_model.sparse.student import delta_student, stacked_base
from tools.demo_model.sparse.writer import LEAST_DISTINCT, Clock, num_distinct
from tools.demo_model.tokenizer import build_tokenizer

CHOICE = Choice(0.05, REPETITION_PENALTY)
TEMPERATURES = (0.6, 1.0)
FREE_TURNS = 0.5  # share of conversations whose first user turn is left to the model
BATCH = 32  # rows routed at a time


def load_model(device: torch.device) -> tuple[Decoder, Tokenizer]:
    """The sparse model in its masked dense form, bfloat16, and its tokenizer."""
    dense = read_gguf(packaged_gguf())
    decoder = dense_decoder(dense.config, dense.tensors, device, torch.bfloat16)
    base = stacked_base(dense.tensors, decoder.shape.num_layers, device)
    with torch.no_grad():
        student = delta_student(decoder, base, shipped_delta(), TOP_K)
        model = student.decoder()
    return model, build_tokenizer(dense.tokenizer)


def write(
    model: Decoder, tokenizer: Tokenizer, options: argparse.Namespace, clock: Clock
) -> Tensor:
    """Conversations without those that loop, int32 [R, T], until there are enough tokens."""
    device = model.embedding.device
    everyday = Everyday(options.seed + 1)
    questions = [everyday.question() for _ in range(256)]
    beginnings = openings(questions, options.seed, FREE_TURNS)
    low, high = TEMPERATURES
    flow = conversation_flow(tokenizer, device, follow_up=True)
    kept: list[Tensor] = []
    torch.manual_seed(options.seed)
    while sum(rows.numel() for rows in kept) < options.tokens:
        opened = list(islice(beginnings, options.rows))
        prompts = [e.ids for e in tokenizer.encode_batch([text for text, _ in opened])]
        request = Request(
            prompt_rows(prompts, options.length).to(device),
            torch.tensor([state for _, state in opened], device=device),
            low + (high - low) * torch.rand(options.rows, device=device),
        )
        rows = sample(model, request, flow, CHOICE, options.compile).int()
        kept.append(rows[num_distinct(rows) >= LEAST_DISTINCT * rows.shape[1]])
        clock.log(f"{sum(rows.numel() for rows in kept):,} tokens written")
    return torch.cat(kept)


def phases(rows: NDArray[np.int64], header: list[int], end: int) -> NDArray[np.uint8]:
    """DECODE for the tokens of the assistant's turns, PREFILL for all others; [R, T] like `rows`.
    A turn's end is not decoded: a chat stops there."""
    place = np.arange(rows.shape[1])
    opens = np.ones(rows.shape, bool)
    for back, token in enumerate(reversed(header)):
        opens &= np.roll(rows, back, axis=1) == token
    opens[:, : len(header) - 1] = False
    opened = np.maximum.accumulate(np.where(opens, place, -1), axis=1)
    closed = np.maximum.accumulate(np.where(rows == end, place, -1), axis=1)
    inside = (opened > closed) & (place > opened)
    return np.where(inside, DECODE, PREFILL).astype(np.uint8)


@torch.no_grad()
def routes(model: Decoder, rows: Tensor, rank: int) -> tuple[NDArray[np.uint8], Tensor | None]:
    """Experts [R, T, L, K], the likeliest first, and hidden states [R, T, rank] behind the final
    norm, projected."""
    assert model.experts is not None
    experts, hidden = [], []
    hidden_size = model.embedding.shape[1]
    axes = torch.from_numpy(projection(hidden_size, rank)).to(rows.device) if rank else None
    for batch in torch.split(rows, BATCH):
        chosen: list[Tensor] = []

        def visit(layer: int, x: Tensor, chosen: list[Tensor] = chosen) -> None:
            router = model.experts[layer].router  # type: ignore[index]
            logits = F.linear(x.float(), router.float())
            chosen.append(logits.topk(model.top_k, dim=-1).indices.to(torch.uint8))

        final = hidden_states(model, batch, visit)
        experts.append(torch.stack(chosen, 2).cpu())
        if axes is not None:
            hidden.append((final.float() @ axes).half().cpu())
    return torch.cat(experts).numpy(), torch.cat(hidden) if hidden else None


def make_trace(model: Decoder, tokenizer: Tokenizer, rows: Tensor, rank: int) -> Trace:
    """All rows, each a sequence of its own."""
    experts, hidden = routes(model, rows, rank)
    ids = rows.cpu().numpy().astype(np.int64)
    header = tokenizer.encode("<|im_start|>assistant\n").ids
    (end,) = tokenizer.encode("<|im_end|>").ids
    count, length = ids.shape
    extra = {}
    if hidden is not None:
        extra["hidden"] = hidden.numpy().reshape(count * length, -1)
        extra["projection"] = projection(model.embedding.shape[1], rank)
        extra["projection_seed"] = PROJECTION_SEED  # type: ignore[assignment]
    assert model.experts is not None
    num_experts = len(model.experts[0].router)
    return Trace(
        "smollm2-sparse",
        "mixtral",
        num_experts,
        experts.astype(expert_dtype(num_experts)).reshape(-1, *experts.shape[2:]),
        np.repeat(np.arange(count, dtype=np.uint32), length),
        phases(ids, header, end).ravel(),
        ids.astype(np.uint32).ravel(),
        **extra,  # type: ignore[arg-type]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--rows", type=int, default=2048, help="written at a time")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--hidden", type=int, default=0, help="dimensions kept of hidden states")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    clock = Clock()
    model, tokenizer = load_model(torch.device(options.device))
    rows = write(model, tokenizer, options, clock)
    trace = make_trace(model, tokenizer, rows, options.hidden)
    num_bytes = trace.save(options.out)
    answers = int((trace.phase == DECODE).sum())
    clock.log(f"{options.out}: {len(trace):,} tokens, {answers:,} of answers, {num_bytes:,} bytes")


if __name__ == "__main__":
    main()
