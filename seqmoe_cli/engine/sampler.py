"""Sampler: logits -> next token, on the device, with settings that change without a new graph."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from seqmoe_cli.settings import SamplingParams
from seqmoe_kernels import SamplingState, sample


class Sampler:
    """The sampling state of the answer under way, in tensors that stay where they are.

    The order of penalties and filters is that of `seqmoe_kernels.sample`. The same seed and the
    same logits give the same tokens on every device.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.state = SamplingState(
            settings=torch.ones(7, device=device),
            stream=torch.zeros(2, dtype=torch.int64, device=device),
            counts=torch.zeros(vocab_size, device=device),
            seen=torch.zeros(vocab_size, dtype=torch.bool, device=device),
        )

    def begin(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """Start an answer to a prompt."""
        p, state = params, self.state
        settings = [p.temperature, p.top_k, p.top_p, p.min_p]
        settings += [p.repeat_penalty, p.presence_penalty, p.frequency_penalty]
        state.settings.copy_(torch.tensor(settings))
        seed = secrets.randbits(32) if p.seed is None else p.seed
        state.stream.copy_(torch.tensor([seed, 0]))
        state.counts.zero_()
        state.seen.zero_()
        prompt = torch.tensor(prompt_ids, dtype=torch.int64, device=state.seen.device)
        state.seen.index_fill_(0, prompt, True)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [vocab_size] -> token id int64 [1], which is then part of the answer."""
        return sample(logits, self.state)
