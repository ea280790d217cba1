"""Batched sampling: models write conversations and answer prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.demo_model.sparse.decoder import Decoder, Stepper

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


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen: never one less likely than `min_p` times the likeliest; the logits of
    tokens that are in the sequence already made worse by the factor `penalty`, 1 for not."""

    min_p: float
    penalty: float = 1.0


@torch.no_grad()
def sample(
    model: Decoder, request: Request, flow: Flow, choice: Choice, compiled: bool = False
) -> Tensor:
    """Complete every row of `prompts`: int64 [B, T]."""
    prompts, state = request.prompts, request.states
    rows, length = prompts.shape
    step = Stepper(model, rows, length, compiled)
    ends = torch.tensor(flow.ends, device=prompts.device)
    done = prompts.clone()
    seen = torch.zeros(rows, len(model.embedding), dtype=torch.bool, device=prompts.device)
    for position in range(length - 1):
        last = done[:, position]
        seen.scatter_(1, last[:, None], True)
        logits = penalised(step(last, position), seen, choice.penalty)
        given = prompts[:, position + 1]
        wanted = torch.where(given == FREE, flow.forced[state], given)
        chosen = choose(logits, request.temperatures, choice.min_p)
        token = torch.where(wanted == FREE, chosen, wanted)
        moved = torch.where(torch.isin(token, ends), flow.at_end[state], flow.after[state])
        state = torch.where(given == FREE, moved, state)
        done[:, position + 1] = token
    return done


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits [B, V] in float32, those of `seen` tokens made worse by a factor."""
    logits = logits.float()
    if penalty == 1:
        return logits
    worse = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, worse, logits)


def choose(logits: Tensor, temperatures: Tensor, min_p: float) -> Tensor:
    """Draw one token a row from logits [B, V]: int64 [B]."""
    probabilities = (logits / temperatures.clamp(min=1e-3)[:, None]).softmax(dim=-1)
    floor = min_p * probabilities.amax(dim=-1, keepdim=True)
    # The largest p / exponential noise is a draw from p.
    noise = torch.empty_like(probabilities).exponential_().clamp_(min=1e-10)
    noise = torch.where(temperatures[:, None] > 0, noise, 1.0)
    return torch.where(probabilities >= floor, probabilities / noise, 0.0).argmax(dim=-1)
