"""What all decoders share: named weights, embedding, norms, linear layers, head.

T tokens of one forward, H hidden size, n query heads, m key/value heads, D head dimension,
K experts per token. A family writes down its layer and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
        [T, num_experts] choose, over h [T, H]: [T, H]. Logits of later routers may follow."""
        ...


class Decoder(ABC):
    """A decoder over its resident weights, under their Hugging Face names.

    The projections below exist for one reason beside the names: each of them is one kernel launch
    when there is one token.
    """

    router = "mlp.gate"
    router_norm = "post_attention_layernorm"

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = weights
        dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        inv_freq = 1.0 / (config.rope_theta ** (dims / config.head_dim))
        self._inv_freq = inv_freq.to(weights["model.embed_tokens.weight"].device)
        self._ahead: dict[str, Matrix] = {}  # by router: those of the next layers
        self._looks_ahead: Callable[[], bool] = lambda: True

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
        """h = norm(x), x [T, H], and the named linear layer over it. If that is a router that looks
        ahead and T is 1, the logits of the next layers' routers come behind its own."""
        more = self._ahead.get(name) if x.shape[0] == 1 and self._looks_ahead() else None
        return normed_linear(x, self.norm(norm), self.matrix(name), more)

    def look_ahead(self, distance: int, on: Callable[[], bool]) -> None:
        """Let every router of a single token be followed by those of up to `distance` next layers
        on the same state, while it is `on`. `look_ahead_bytes` are made for it.

        A router reads its layer's norm of the state. The state is normed once; what the gains of
        the other norm differ by is in the weights.
        """
        self._looks_ahead = on
        last = self.config.num_hidden_layers - 1
        for n in range(last):
            gain = self._gain(n)
            stack = [
                self._router_weight(later).float()
                * torch.where(gain == 0, 0, self._gain(later) / gain)
                for later in range(n + 1, min(n + distance, last) + 1)
            ]
            own = self._router_weight(n)
            self._ahead[self._router_name(n)] = Matrix(torch.cat(stack).to(own.dtype).contiguous())

    def _router_name(self, n: int) -> str:
        return f"model.layers.{n}.{self.router}"

    def _router_weight(self, n: int) -> torch.Tensor:
        return self.weights[f"{self._router_name(n)}.weight"]

    def _gain(self, n: int) -> torch.Tensor:
        return self.weights[f"model.layers.{n}.{self.router_norm}.weight"].float()

    def add_projection(self, residual: torch.Tensor, name: str, x: torch.Tensor) -> torch.Tensor:
        """`residual` [T, H] plus the named linear layer of x [T, in]."""
        return linear(x, self.matrix(name), residual=residual)

    def rotation(self, q_norm: str | None = None, k_norm: str | None = None) -> Rotation:
        """The rotary embedding, after the named norms of queries and keys: each head by itself when
        a norm has D weights, all of a token together when it has as many as they."""
        q, k = (None if name is None else self.norm(name).weight for name in (q_norm, k_norm))
        return Rotation(self._inv_freq, q, k, self.config.rms_norm_eps)


def look_ahead_bytes(config: ModelConfig, distance: int, dtype: torch.dtype) -> int:
    """What `Decoder.look_ahead` allocates."""
    layers = config.num_hidden_layers
    routers = sum(min(distance, layers - 1 - n) for n in range(layers))
    return routers * config.num_experts * config.hidden_size * dtype.itemsize
