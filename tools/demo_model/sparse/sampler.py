"""Batched sampling: the teacher writes conversations, both models answer prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.demo_model.sparse.decoder import Decoder, rotary_table, step

FREE = -1  # in `forced`: the model chooses this token


@dataclass(frozen=True)
class Flow:
    """What follows a turn's end, as a little state machine over tokens.

    In state s the next token is `forced[s]`, or sampled where that is FREE; then comes state
    `after[s]`, or `at_end[s]` when the token ends a turn.
    """

    forced: Tensor
    after: Tensor
    at_end: Tensor
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """What to sample: `prompts` int64 [B, T], FREE behind each prompt; `states` [B], where
    each sequence stands behind its prompt; `temperatures` [B], 0 for greedy."""

    prompts: Tensor
    states: Tensor
    temperatures: Tensor


def sample(model: Decoder, request: Request, flow: Flow, min_p: float) -> Tensor:
    """Complete every row of `prompts`: int64 [B, T]. Tokens less likely than `min_p` times the
    likeliest are never chosen."""
    prompts, state = request.prompts, request.states
    rows, length = prompts.shape
    shape, device = model.shape, prompts.device
    size = (shape.num_layers, rows, shape.num_kv_heads, length, shape.head_dim)
    keys = torch.empty(size, device=device, dtype=model.embedding.dtype)
    values = torch.empty_like(keys)
    rotary = rotary_table(shape, length, device)
    ends = torch.tensor(flow.ends, device=device)
    done = prompts.clone()
    with torch.no_grad():
        for position in range(length - 1):
            logits = step(model, done[:, position], position, keys, values, rotary)
            given = prompts[:, position + 1]
            wanted = torch.where(given == FREE, flow.forced[state], given)
            chosen = choose(logits, request.temperatures, min_p)
            token = torch.where(wanted == FREE, chosen, wanted)
            moved = torch.where(torch.isin(token, ends), flow.at_end[state], flow.after[state])
            state = torch.where(given == FREE, moved, state)
            done[:, position + 1] = token
    return done


def choose(logits: Tensor, temperatures: Tensor, min_p: float) -> Tensor:
    """Draw one token a row from logits [B, V]: int64 [B]."""
    probabilities = (logits.float() / temperatures.clamp(min=1e-3)[:, None]).softmax(dim=-1)
    floor = min_p * probabilities.amax(dim=-1, keepdim=True)
    # The largest p / exponential noise is a draw from p.
    noise = torch.empty_like(probabilities).exponential_().clamp_(min=1e-10)
    noise = torch.where(temperatures[:, None] > 0, noise, 1.0)
    return torch.where(probabilities >= floor, probabilities / noise, 0.0).argmax(dim=-1)
