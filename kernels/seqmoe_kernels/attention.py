"""Attention of one query token over the KV state."""

from __future__ import annotations

import torch


def attention_decode_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    count = int(length)
    num_heads, dim = q.shape
    heads = q.float().view(keys.shape[1], -1, dim)  # [m, n / m, D]
    scores = heads @ keys[:count].float().permute(1, 2, 0) * scale  # [m, n / m, count]
    mixed: torch.Tensor = scores.softmax(-1) @ values[:count].float().transpose(0, 1)
    return mixed.view(num_heads, dim).to(q.dtype)


def attention_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend with one token's heads `q` [n, D] over the first `length` (int32 [1], on the same
    device, at least 1) positions of `keys` and `values` [C, m, D].

    Query head i reads KV head i // (n / m). Scores, softmax and sums are f32; the result [n, D] has
    the dtype of `q` and does not depend on the capacity C.
    """
    return attention_decode_reference(q, keys, values, length, scale)
