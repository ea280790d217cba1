"""What all decoders share: named weights, embedding, norms, linear layers, head.

T tokens of one forward, H hidden size, n query heads, m key/value heads, D head dimension,
K experts per token. A family writes down its layer and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from seqmoe_kernels import Matrix, Norm, Rotation, linear, linears, normed_linear, rms_norm
from seqmoe_weights.config import ModelConfig


class Attention(Protocol):
    """The sequence so far, as a layer sees it."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Rotate q [T, n * D] and k [T, m * D] to their positions, add k and v [T, m * D] to the KV
        state, let q attend causally: [T, n * D]."""
        ...


class Experts(Protocol):
    """The routed experts, wherever they are."""

    def __call__(
        self, layer: int, x: torch.Tensor, h: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """x [T, H] plus the weighted sum of the experts that the router's `logits`
        [T, num_experts] choose, over h [T, H]: [T, H]."""
        ...


class Decoder(ABC):
    """A decoder over its resident weights, under their Hugging Face names.

    The projections below exist for one reason beside the names: each of them is one kernel launch
    when there is one token.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = weights
        dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        inv_freq = 1.0 / (config.rope_theta ** (dims / config.head_dim))
        self._inv_freq = inv_freq.to(weights["model.embed_tokens.weight"].device)

    @abstractmethod
    def layer(
        self, n: int, x: torch.Tensor, attention: Attention, experts: Experts
    ) -> torch.Tensor:
        """Layer n: residual stream x [T, H] -> [T, H]."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [T] -> residual stream [T, H]."""
        return F.embedding(ids, self.weights["model.embed_tokens.weight"])

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Residual stream [T, H] -> logits f32 [T, vocab_size]."""
        tied = self.config.tie_word_embeddings
        name = "model.embed_tokens" if tied else "lm_head"
        return linear(self.normed("model.norm", x), self.matrix(name)).float()

    def normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x after the named norm over its last dimension."""
        return rms_norm(x, *self.norm(name))

    def norm(self, name: str) -> Norm:
        return Norm(self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def matrix(self, name: str) -> Matrix:
        weight = f"{name}.weight"
        return Matrix(self.weights[weight], self.weights.get(f"{weight}_scale_inv"))

    def projections(self, x: torch.Tensor, norm: str, *names: str) -> list[torch.Tensor]:
        """The named linear layers over norm(x), x [T, H]: [T, out] each."""
        return linears(x, [self.matrix(name) for name in names], self.norm(norm))

    def normed_projection(
        self, x: torch.Tensor, norm: str, name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h = norm(x), x [T, H], and the named linear layer over it."""
        return normed_linear(x, self.norm(norm), self.matrix(name))

    def add_projection(self, residual: torch.Tensor, name: str, x: torch.Tensor) -> torch.Tensor:
        """`residual` [T, H] plus the named linear layer of x [T, in]."""
        return linear(x, self.matrix(name), residual=residual)

    def rotation(self, q_norm: str | None = None, k_norm: str | None = None) -> Rotation:
        """The rotary embedding, after the named norms of queries and keys: each head by itself when
        a norm has D weights, all of a token together when it has as many as they."""
        q, k = (None if name is None else self.norm(name).weight for name in (q_norm, k_norm))
        return Rotation(self._inv_freq, q, k, self.config.rms_norm_eps)
