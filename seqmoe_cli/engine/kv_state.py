"""KVState: keys and values of the tokens seen so far, and attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from seqmoe_kernels import attention_decode
from seqmoe_weights.config import ModelConfig


class KVSnapshot(NamedTuple):
    """A copy of the state at one moment; keys and values [layers, tokens, m, D]."""

    token_ids: list[int]
    keys: torch.Tensor
    values: torch.Tensor


class KVState:
    """Room for `ctx_size` tokens: keys and values [layers, ctx_size, m, D] in `dtype`.

    A forward is `begin(T)`, one call per layer, `advance(T)`, then `commit(ids)`. What has not been
    committed does not count, so an abandoned forward leaves the state as it was. Where the device
    is stands on the device: after a forward, those of one token each can follow with `go_on()` in
    the place of `begin(1)`, whether or not the host has committed the ones before.
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
        self._cursor = torch.arange(2, device=device)  # next position, and what a token there sees
        self._positions = self._cursor[:1]

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return len(self.token_ids)

    def begin(self, num_tokens: int) -> torch.Tensor:
        """Start a forward of `num_tokens` after those held; their positions, int64 [T]."""
        end = self.length + num_tokens
        if end > self.ctx_size:
            raise ValueError(f"{end} tokens do not fit a context of {self.ctx_size}")
        torch.arange(self.length, self.length + 2, out=self._cursor)
        if num_tokens == 1:
            return self.go_on()
        self._positions = torch.arange(self.length, end, device=self.keys.device)
        return self._positions

    def go_on(self) -> torch.Tensor:
        """Start a forward of the one token after all that the device has seen; its position,
        int64 [1], is always the same tensor. The caller sees to it that the context has room."""
        self._positions = self._cursor[:1]
        return self._positions

    def advance(self, num_tokens: int) -> None:
        """Let the device go on to the position after this forward's tokens."""
        self._cursor += num_tokens

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write k, v [T, m, D] at the positions of this forward and attend: [T, n * D]."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(0, self._positions, k)
        values.index_copy_(0, self._positions, v)
        if q.shape[0] == 1:
            out = attention_decode(q[0], keys, values, self._cursor[1:], self._scale)
            return out.reshape(1, -1)
        end = self.length + q.shape[0]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys[:end].transpose(0, 1).unsqueeze(0),
            values[:end].transpose(0, 1).unsqueeze(0),
            attn_mask=self._causal_mask(end),
            scale=self._scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).reshape(q.shape[0], -1)

    def _causal_mask(self, end: int) -> torch.Tensor:
        """bool [T, end]: token i of this forward sees the keys up to its own position."""
        return torch.arange(end, device=self.keys.device) <= self._positions.unsqueeze(1)

    def commit(self, ids: Sequence[int]) -> None:
        """Count the tokens of a forward as held."""
        self.token_ids.extend(ids)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        del self.token_ids[length:]

    def snapshot(self) -> KVSnapshot:
        """Copy what is held, to come back to it whatever happens in between."""
        n = self.length
        return KVSnapshot(
            list(self.token_ids), self.keys[:, :n].clone(), self.values[:, :n].clone()
        )

    def restore(self, snapshot: KVSnapshot) -> None:
        """Go back to a snapshot of this state."""
        n = len(snapshot.token_ids)
        self.keys[:, :n] = snapshot.keys
        self.values[:, :n] = snapshot.values
        self.token_ids = list(snapshot.token_ids)
