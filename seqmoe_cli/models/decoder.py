"""What all decoders share: named weights, embedding, norm, rotary embedding, head.

T tokens of one forward, H hidden size, n query heads, m key/value heads, D head dimension,
K experts per token. A family writes down its layer and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from seqmoe_kernels import linear, rms_norm, rotary
from seqmoe_weights.config import ModelConfig


class Attention(Protocol):
    """The sequence so far, as a layer sees it."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Add k, v [T, m, D] to the KV state, let q [T, n, D] attend causally: [T, n * D]."""
        ...


class Experts(Protocol):
    """The routed experts, wherever they are."""

    def __call__(
        self, layer: int, h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """sum over K of weights * expert(h): h [T, H], ids int32 [T, K], weights f32 [T, K]."""
        ...


class Decoder(ABC):
    """A decoder over its resident weights, under their Hugging Face names."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = weights
        dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        inv_freq = 1.0 / (config.rope_theta ** (dims / config.head_dim))
        self.inv_freq = inv_freq.to(weights["model.embed_tokens.weight"].device)

    @abstractmethod
    def layer(
        self,
        n: int,
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        experts: Experts,
    ) -> torch.Tensor:
        """Layer n: residual stream x [T, H] at positions int64 [T] -> [T, H]."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [T] -> residual stream [T, H]."""
        return F.embedding(ids, self.weights["model.embed_tokens.weight"])

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Residual stream [T, H] -> logits f32 [T, vocab_size]."""
        tied = self.config.tie_word_embeddings
        name = "model.embed_tokens" if tied else "lm_head"
        return self.linear(name, self.norm("model.norm", x)).float()

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension."""
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] times the named weight [out, in]: [T, out]."""
        weight = f"{name}.weight"
        return linear(x, self.weights[weight], self.weights.get(f"{weight}_scale_inv"))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads * D] -> [T, heads, D]."""
        return x.view(x.shape[0], -1, self.config.head_dim)

    def rotary(
        self, x: torch.Tensor, positions: torch.Tensor, norm: str | None = None
    ) -> torch.Tensor:
        """Rotate x [T, heads, D] to its positions, after a norm of each head when one is named."""
        weight = None if norm is None else self.weights[f"{norm}.weight"]
        return rotary(x, positions, self.inv_freq, weight, self.config.rms_norm_eps)
