"""KVState: keys and values of the tokens seen so far, and attention over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from seqmoe_kernels import Rotation, attention_step, rms_norm, rotary
from seqmoe_weights.config import ModelConfig


class KVState:
    """Room for `ctx_size` tokens: keys and values [layers, ctx_size, m, D] in `dtype`.

    A forward is `begin(T)`, one call per layer, `advance(T)`, then `commit(ids)`. What has not been
    committed does not count, so an abandoned forward leaves the state as it was. Where the device
    is stands on the device: after a forward, those of one token each can follow without `begin`,
    whether or not the host has committed the ones before, as long as the context has room.
    """

    def __init__(
        self, config: ModelConfig, ctx_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (
            config.num_hidden_layers,
            ctx_size,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.ctx_size = ctx_size
        self.token_ids: list[int] = []
        self._scale = config.head_dim**-0.5
        self._position = torch.zeros(1, dtype=torch.int64, device=device)  # of the next token
        self._positions = self._position

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return len(self.token_ids)

    def begin(self, num_tokens: int) -> None:
        """Start a forward of `num_tokens` after those held."""
        end = self.length + num_tokens
        if end > self.ctx_size:
            raise ValueError(f"{end} tokens do not fit a context of {self.ctx_size}")
        self._position.fill_(self.length)
        self._positions = torch.arange(self.length, end, device=self.keys.device)

    def advance(self, num_tokens: int) -> None:
        """Let the device go on to the position after this forward's tokens."""
        self._position += num_tokens

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Rotate q [T, n * D] and k [T, m * D] to the positions of this forward, write k and
        v [T, m * D] there, and attend: [T, n * D]."""
        keys, values = self.keys[layer], self.values[layer]
        if q.shape[0] == 1:
            return attention_step(q, k, v, keys, values, self._position, rotation, self._scale)
        heads = self._rotated(q, rotation.q_norm, rotation)
        keys.index_copy_(0, self._positions, self._rotated(k, rotation.k_norm, rotation))
        values.index_copy_(0, self._positions, v.view(-1, *values.shape[1:]))
        end = self.length + q.shape[0]
        out = F.scaled_dot_product_attention(
            heads.transpose(0, 1).unsqueeze(0),
            keys[:end].transpose(0, 1).unsqueeze(0),
            values[:end].transpose(0, 1).unsqueeze(0),
            attn_mask=self._causal_mask(end),
            scale=self._scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).reshape(q.shape[0], -1)

    def _rotated(
        self, x: torch.Tensor, norm: torch.Tensor | None, rotation: Rotation
    ) -> torch.Tensor:
        """x [T, heads * D] -> [T, heads, D], normed (head by head, or all together) and rotated."""
        if norm is not None:
            x = rms_norm(x.view(-1, len(norm)), norm, rotation.eps)
        heads = x.view(len(self._positions), -1, self.keys.shape[-1])
        return rotary(heads, self._positions, rotation.inv_freq)

    def _causal_mask(self, end: int) -> torch.Tensor:
        """bool [T, end]: token i of this forward sees the keys up to its own position."""
        return torch.arange(end, device=self.keys.device) <= self._positions.unsqueeze(1)

    def commit(self, ids: Sequence[int]) -> None:
        """Count the tokens of a forward as held."""
        self.token_ids.extend(ids)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        del self.token_ids[length:]
