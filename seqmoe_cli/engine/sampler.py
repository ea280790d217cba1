"""Sampler: logits -> next token, on the device, without waiting for the host."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

import torch

from seqmoe_cli.settings import SamplingParams


class Sampler:
    """One answer's sampling state: random numbers and the counts that penalties look at.

    Order: penalties, temperature, top-k, top-p, min-p, draw. The repeat penalty divides positive
    and multiplies negative logits of tokens seen in the prompt or the answer; presence and
    frequency penalties are subtracted for tokens of the answer alone. Each filter looks at the
    probabilities that the one before it left over, renormalised. The draw divides probabilities
    by exponential noise and takes the largest (the Gumbel-max trick), so it needs no host.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(32))
        self.params = params
        self._generator = torch.Generator(device=device).manual_seed(params.seed or 0)
        self._counts = torch.zeros(vocab_size, device=device)  # f32, tokens of the answer
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._seen[torch.tensor(prompt_ids, dtype=torch.int64, device=device)] = True

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits f32 [vocab_size] -> token id int64 [1], which is then counted as part of the
        answer."""
        logits = self._penalised(logits)
        if self.params.temperature == 0:
            token = logits.argmax(keepdim=True)
        else:
            token = self._draw(logits / self.params.temperature)
        self._counts[token] += 1
        self._seen[token] = True
        return token

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        p = self.params
        if p.repeat_penalty != 1:
            scaled = torch.where(logits > 0, logits / p.repeat_penalty, logits * p.repeat_penalty)
            logits = torch.where(self._seen, scaled, logits)
        if p.presence_penalty or p.frequency_penalty:
            logits = logits - p.frequency_penalty * self._counts
            logits = logits - p.presence_penalty * (self._counts > 0)
        return logits

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        p = self.params
        logits, ids = logits.sort(descending=True, stable=True)
        if 0 < p.top_k < logits.shape[0]:
            logits, ids = logits[: p.top_k], ids[: p.top_k]
        probs = logits.softmax(0)
        if p.top_p < 1:
            before = probs.cumsum(0) - probs  # the token that crosses top_p is kept
            probs = probs.where(before < p.top_p, 0)
        if p.min_p > 0:
            probs = probs.where(probs >= p.min_p * probs[0], 0)
        noise = torch.empty_like(probs).exponential_(generator=self._generator)
        return ids[(probs / noise).argmax(keepdim=True)]
