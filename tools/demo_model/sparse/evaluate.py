"""Figures of a model: perplexity, how evenly its experts are used, answers to the fixed prompts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.sparse.chat import (
    ASSISTANT_TURN,
    conversation_flow,
    fixed_prompts,
    opened,
    prompt_rows,
)
from tools.demo_model.sparse.decoder import Decoder, hidden_states, route
from tools.demo_model.sparse.sampler import Request, sample

BATCH = 16  # rows
CHUNK = 4096  # tokens whose logits are in memory at a time
CARD_TEMPERATURES = (0.0, 0.2)  # greedy, and what generation_config.json advises
MIN_P = 0.05


@torch.no_grad()
def perplexity(model: Decoder, rows: Tensor) -> float:
    """Of the second to the last token of each row [R, T]."""
    total = 0.0
    for batch in torch.split(rows, BATCH):
        hidden = hidden_states(model, batch)[:, :-1].flatten(0, 1)
        wanted = batch[:, 1:].flatten().long()
        for part in range(0, len(wanted), CHUNK):
            some = slice(part, part + CHUNK)
            logits = F.linear(hidden[some], model.embedding).float()
            total += F.cross_entropy(logits, wanted[some], reduction="sum").item()
    return math.exp(total / rows[:, 1:].numel())


@torch.no_grad()
def expert_load(model: Decoder, rows: Tensor) -> Tensor:
    """How often each expert is chosen, over how often it would be by turns: [L, E]."""
    assert model.experts is not None
    load = torch.zeros(len(model.layers), len(model.experts[0].router), device=rows.device)

    def visit(i: int, inputs: Tensor) -> None:
        experts = model.routing(i)
        assert experts is not None
        weights, _ = route(inputs, experts.router, model.top_k)
        load[i] += (weights > 0).float().flatten(0, 1).sum(dim=0)

    for batch in torch.split(rows, BATCH):
        hidden_states(model, batch, visit)
    return load * load.shape[1] / rows.numel() / model.top_k


def card_answers(model: Decoder, tokenizer: Tokenizer, length: int) -> list[list[list[str]]]:
    """What a model answers to each turn of each fixed prompt, at each of CARD_TEMPERATURES.

    An answer that has not ended within `length` tokens ends in "[cut]".
    """
    conversations = [[("user", turns[0])] for _ in CARD_TEMPERATURES for turns in fixed_prompts()]
    temperatures = [t for t in CARD_TEMPERATURES for _ in fixed_prompts()]
    asked = [turns for _ in CARD_TEMPERATURES for turns in fixed_prompts()]
    found = [[text] for text in _answers(model, tokenizer, conversations, temperatures, length)]
    again = [i for i, turns in enumerate(asked) if len(turns) > 1]
    seconds = [
        [*conversations[i], ("assistant", found[i][0]), ("user", asked[i][1])] for i in again
    ]
    warmth = [temperatures[i] for i in again]
    for i, text in zip(again, _answers(model, tokenizer, seconds, warmth, length), strict=True):
        found[i].append(text)
    per_temperature = len(fixed_prompts())
    return [
        found[start : start + per_temperature] for start in range(0, len(found), per_temperature)
    ]


def _answers(
    model: Decoder,
    tokenizer: Tokenizer,
    conversations: list[list[tuple[str, str]]],
    temperatures: list[float],
    length: int,
) -> list[str]:
    device = model.embedding.device
    texts = [opened(turns, "assistant") for turns in conversations]
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    request = Request(
        prompt_rows(prompts, length + max(map(len, prompts))).to(device),
        torch.full((len(texts),), ASSISTANT_TURN, device=device),
        torch.tensor(temperatures, device=device),
    )
    flow = conversation_flow(tokenizer, device, follow_up=False)
    rows = sample(model, request, flow, MIN_P).tolist()
    answers = []
    for prompt, row in zip(prompts, rows, strict=True):
        answer = row[len(prompt) : len(prompt) + length]
        stops = [i for i, token in enumerate(answer) if token in flow.ends]
        shown = tokenizer.decode(answer[: stops[0]] if stops else answer)
        answers.append(shown.strip() if stops else shown.strip() + " [cut]")
    return answers
