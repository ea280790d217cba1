"""What all decoders share: resident weights by role, embedding, blocks of a layer, head.

T tokens of one forward, H hidden size, n query heads, m key/value heads, D head dimension,
K experts per token. A family puts the blocks of its layer together, and adds what only it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from seqmoe_kernels import Matrix, Norm, Rotation, linear, linears, normed_linear, rms_norm
from seqmoe_weights.config import ModelConfig
from seqmoe_weights.families import TensorSpec, find_family, scale_spec


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


class Decoder:
    """A decoder over its resident weights. It asks for them by role and layer; how a family calls
    its tensors stands in `seqmoe_weights.families`. A family whose layer is another one has a
    subclass with a `layer` of its own."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        """`weights`: what `PackedModel.load_resident` gives."""
        self.config = config
        self._matrices = {
            (spec.role, spec.layer): Matrix.of(*_parts(spec, weights))
            for spec in find_family(config.family).resident_tensors(config)
        }
        dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        inv_freq = 1.0 / (config.rope_theta ** (dims / config.head_dim))
        self._inv_freq = inv_freq.to(self.weight("embedding").device)

    def layer(
        self,
        n: int,
        x: torch.Tensor,
        attention: Attention,
        experts: Experts,
        ahead: Matrix | None = None,
    ) -> torch.Tensor:
        """Layer n: residual stream x [T, H] -> [T, H]: attention, then the mixture of experts.
        `ahead`: see `mix_experts`."""
        x = self.attend(n, x, attention)
        return self.mix_experts(n, x, experts, ahead)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [T] -> residual stream [T, H]."""
        return F.embedding(ids, self.weight("embedding"))

    def final_norm(self, x: torch.Tensor) -> torch.Tensor:
        """Residual stream [T, H] -> what the head reads, [T, H]."""
        return rms_norm(x, *self.norm("final_norm"))

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Residual stream [T, H] -> logits f32 [T, vocab_size]."""
        role = "embedding" if self.config.tie_word_embeddings else "head"
        return linear(self.final_norm(x), self.matrix(role)).float()

    def attend(self, n: int, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        """x [T, H] plus what grouped-query attention over its norm gives, [T, H]."""
        projections = [self.matrix(role, n) for role in ("q", "k", "v")]
        q, k, v = linears(x, projections, self.norm("attention_norm", n))
        mixed = attention(n, q, k, v, self.rotation(n))
        return linear(mixed, self.matrix("o", n), residual=x)

    def mix_experts(
        self, n: int, x: torch.Tensor, experts: Experts, ahead: Matrix | None = None
    ) -> torch.Tensor:
        """x [T, H] plus what the routed experts over its norm give, [T, H]. `ahead`: routers of
        later layers; their logits over the same normed x follow those of this layer's router."""
        norm, router = self.norm("mlp_norm", n), self.matrix("router", n)
        h, logits = normed_linear(x, norm, router, ahead)
        return experts(n, x, h, logits)

    def rotation(self, n: int) -> Rotation:
        """The rotary embedding of a layer. Where the family has norms of queries and keys it comes
        after them: each head by itself when a norm has D weights, all of a token together when it
        has as many as they."""
        q, k = (
            self.weight(role, n) if (role, n) in self._matrices else None
            for role in ("q_norm", "k_norm")
        )
        return Rotation(self._inv_freq, q, k, self.config.rms_norm_eps)

    def weight(self, role: str, layer: int | None = None) -> torch.Tensor:
        """The tensor of a role: of that layer, or of the model."""
        return self.matrix(role, layer).parts[0]

    def matrix(self, role: str, layer: int | None = None) -> Matrix:
        """The linear layer of a role."""
        return self._matrices[role, layer]

    def norm(self, role: str, layer: int | None = None) -> Norm:
        """The norm of a role."""
        return Norm(self.weight(role, layer), self.config.rms_norm_eps)


def _parts(spec: TensorSpec, weights: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Of a stored weight: the tensor, and its scales if it is FP8."""
    yield weights[spec.name]
    if spec.quantized and (scale := weights.get(scale_spec(spec).name)) is not None:
        yield scale
