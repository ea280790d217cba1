"""What is kept of the tokens seen so far: a state for each layer, and where the sequence is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from seqmoe_kernels import Rotation, attention_step, rms_norm, rotary
from seqmoe_weights.config import ModelConfig


class Positions(NamedTuple):
    """Where the tokens of a forward are: `first` int64 [1], and for T > 1 all of them, `every`
    int64 [T], with the number of positions up to the last one, `end`."""

    first: torch.Tensor
    every: torch.Tensor
    end: int


class LayerState(Protocol):
    """The state of one layer. Other kinds of layers bring other states: one that cannot be cut back
    copies itself in `snapshot`."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Rotation,
        positions: Positions,
    ) -> torch.Tensor: ...

    def snapshot(self, length: int) -> Any:
        """What `restore` needs to come back to the state behind `length` tokens."""

    def restore(self, snapshot: Any) -> None:
        """Be as it was behind so many tokens."""


class KeysAndValues:
    """Of attention: keys and values [ctx_size, m, D] by position. They are only added to:
    the rows behind a snapshot's length are not read, and written again."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self._scale = keys.shape[-1] ** -0.5

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Rotation,
        positions: Positions,
    ) -> torch.Tensor:
        """Rotate q [T, n * D] and k [T, m * D] to their positions, write k and v [T, m * D] there,
        and attend: [T, n * D]."""
        keys, values, (first, every, end) = self.keys, self.values, positions
        if q.shape[0] == 1:
            return attention_step(q, k, v, keys, values, first, rotation, self._scale)
        heads = self._rotated(q, rotation.q_norm, rotation, every)
        keys.index_copy_(0, every, self._rotated(k, rotation.k_norm, rotation, every))
        values.index_copy_(0, every, v.view(-1, *values.shape[1:]))
        seen = torch.arange(end, device=keys.device) <= every.unsqueeze(1)  # up to its own position
        out = F.scaled_dot_product_attention(
            heads.transpose(0, 1).unsqueeze(0),
            keys[:end].transpose(0, 1).unsqueeze(0),
            values[:end].transpose(0, 1).unsqueeze(0),
            attn_mask=seen,
            scale=self._scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).reshape(q.shape[0], -1)

    def _rotated(
        self, x: torch.Tensor, norm: torch.Tensor | None, rotation: Rotation, every: torch.Tensor
    ) -> torch.Tensor:
        """x [T, heads * D] -> [T, heads, D], normed (head by head, or all together) and rotated."""
        if norm is not None:
            x = rms_norm(x.view(-1, len(norm)), norm, rotation.eps)
        heads = x.view(len(every), -1, self.keys.shape[-1])
        return rotary(heads, every, rotation.inv_freq)

    def snapshot(self, length: int) -> int:
        return length

    def restore(self, snapshot: int) -> None:
        """Nothing has to be moved."""


class KVState:
    """Room for `ctx_size` tokens: `keys` and `values` [layers, ctx_size, m, D] in `dtype`, of which
    each of the `layers` has its part.

    A forward is `begin(T)`, one call per layer, `advance(T)`, then `commit(ids)`. What has not been
    committed does not count, so an abandoned forward leaves the state as it was. Where the device
    is stands on the device: after a forward, those of one token each can follow without `begin`,
    whether or not the host has committed the ones before, as long as the context has room.
    """

    def __init__(
        self, config: ModelConfig, ctx_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        heads = (config.num_key_value_heads, config.head_dim)
        shape = (config.num_hidden_layers, ctx_size, *heads)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        parts = zip(self.keys, self.values, strict=True)
        self.layers: list[LayerState] = [KeysAndValues(*part) for part in parts]
        self.ctx_size = ctx_size
        self.token_ids: list[int] = []
        self._next = torch.zeros(1, dtype=torch.int64, device=device)  # position of the next token
        self._positions = Positions(self._next, self._next, 1)

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return len(self.token_ids)

    def begin(self, num_tokens: int) -> None:
        """Start a forward of `num_tokens` after those held."""
        end = self.length + num_tokens
        if end > self.ctx_size:
            raise ValueError(f"{end} tokens do not fit a context of {self.ctx_size}")
        self._next.fill_(self.length)
        every = torch.arange(self.length, end, device=self.keys.device)
        self._positions = Positions(self._next, every, end)

    def advance(self, num_tokens: int) -> None:
        """Let the device go on to the position after this forward's tokens."""
        self._next += num_tokens

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """The state of a layer takes in this forward's q [T, n * D], k and v [T, m * D], and gives
        [T, n * D]."""
        return self.layers[layer](q, k, v, rotation, self._positions)

    def commit(self, ids: Sequence[int]) -> None:
        """Count the tokens of a forward as held."""
        self.token_ids.extend(ids)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        for layer in self.layers:
            layer.restore(layer.snapshot(length))
        del self.token_ids[length:]
