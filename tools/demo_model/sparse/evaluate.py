"""Figures of a model: perplexity, how evenly its experts are used, its answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.sparse.build import REPETITION_PENALTY
from tools.demo_model.sparse.chat import ASSISTANT_TURN, conversation_flow, opened, prompt_rows
from tools.demo_model.sparse.decoder import Decoder, hidden_states, route
from tools.demo_model.sparse.sampler import Choice, Request, sample

BATCH = 16  # rows
CHUNK = 4096  # tokens whose logits are in memory at a time
CHOICE = Choice(0.1, REPETITION_PENALTY)  # about as generation_config.json advises
CUT = " [cut]"
HELD_OUT = Path(__file__).parent / "held_out.safetensors"  # of the first training


def held_out_chats() -> Tensor:
    """The dense model's conversations that neither training has seen: int32 [R, T]."""
    return load_file(HELD_OUT)["chats"]


@torch.no_grad()
def perplexity(model: Decoder, rows: Tensor, load: LoadCount | None = None) -> float:
    """Of the second to the last token of each row [R, T]; `load` counts the experts chosen."""
    total = 0.0
    for batch in torch.split(rows, BATCH):
        hidden = hidden_states(model, batch, load)[:, :-1].flatten(0, 1)
        wanted = batch[:, 1:].flatten().long()
        for part in range(0, len(wanted), CHUNK):
            some = slice(part, part + CHUNK)
            logits = F.linear(hidden[some], model.embedding).float()
            total += F.cross_entropy(logits, wanted[some], reduction="sum").item()
    return math.exp(total / rows[:, 1:].numel())


class LoadCount:
    """Counts how often each expert is chosen: to be shown to `hidden_states` as its `visit`."""

    def __init__(self, model: Decoder) -> None:
        assert model.experts is not None
        self._experts, self._top_k = model.experts, model.top_k
        size = len(model.experts), len(model.experts[0].router)
        self._chosen = torch.zeros(size, device=model.embedding.device)

    def __call__(self, layer: int, inputs: Tensor) -> None:
        weights, _ = route(inputs, self._experts[layer].router, self._top_k)
        self._chosen[layer] += (weights > 0).float().flatten(0, 1).sum(dim=0)

    def load(self) -> Tensor:
        """How often each expert was chosen, over how often it would be by turns: [L, E]."""
        return self._chosen / self._chosen.mean(dim=1, keepdim=True)


@torch.no_grad()
def expert_load(model: Decoder, rows: Tensor) -> Tensor:
    """The load of each expert on rows [R, T]: [L, E]."""
    count = LoadCount(model)
    for batch in torch.split(rows, BATCH):
        hidden_states(model, batch, count)
    return count.load()


@dataclass(frozen=True)
class Interview:
    """How answers are asked for: `length` tokens an answer may take."""

    tokenizer: Tokenizer
    length: int
    compiled: bool

    def __call__(
        self, model: Decoder, conversations: list[list[str]], temperature: float
    ) -> list[list[str]]:
        """What a model answers to each user turn of conversations of one or two.

        An answer that has not ended within `length` tokens ends in CUT.
        """
        asked = [[("user", turns[0])] for turns in conversations]
        found = [[text] for text in self._answers(model, asked, temperature)]
        again = [i for i, turns in enumerate(conversations) if len(turns) > 1]
        seconds = [
            [*asked[i], ("assistant", found[i][0]), ("user", conversations[i][1])] for i in again
        ]
        for i, text in zip(again, self._answers(model, seconds, temperature), strict=True):
            found[i].append(text)
        return found

    def _answers(
        self, model: Decoder, conversations: list[list[tuple[str, str]]], temperature: float
    ) -> list[str]:
        if not conversations:
            return []
        device = model.embedding.device
        texts = [opened(turns, "assistant") for turns in conversations]
        prompts = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        request = Request(
            prompt_rows(prompts, self.length + max(map(len, prompts))).to(device),
            torch.full((len(texts),), ASSISTANT_TURN, device=device),
            torch.full((len(texts),), temperature, device=device),
        )
        flow = conversation_flow(self.tokenizer, device, follow_up=False)
        rows = sample(model, request, flow, CHOICE, self.compiled).tolist()
        answers = []
        for prompt, row in zip(prompts, rows, strict=True):
            answer = row[len(prompt) : len(prompt) + self.length]
            stops = [i for i, token in enumerate(answer) if token in flow.ends]
            shown = self.tokenizer.decode(answer[: stops[0]] if stops else answer)
            answers.append(shown.strip() if stops else shown.strip() + CUT)
        return answers


def ended(answers: list[list[str]]) -> float:
    """The share of answers that ended by themselves."""
    texts = [text for answer in answers for text in answer]
    return sum(not text.endswith(CUT) for text in texts) / len(texts)
