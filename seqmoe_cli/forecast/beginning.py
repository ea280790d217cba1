"""Where the training of a predictor begins: what can be had by counting, put into its weights.

V token ids, N flat expert ids, W windows of steps ahead, R the rank of the token table, H the width
of the model's own embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmoe_cli.forecast.corpus import Corpus
from seqmoe_cli.forecast.predictor import HALF_LIVES, LEAST_RATE, WINDOWS, Predictor

_PRIOR = 4.0  # uses at the mean rate that are added to what was counted behind a token
_MOST = 1 << 28  # numbers in a table of counts
_POWER = 0.5  # of the decayed rate over the mean rate


@torch.no_grad()
def begin(predictor: Predictor, corpus: Corpus, embedding: Tensor | None = None) -> None:
    """Make the predictor say at first: mean rates, times what the token lets expect, times a power
    of the decayed rates.

    The token table is that of the counts behind each token of `corpus`, cut to its main components.
    A token that was not seen, or seldom, gets what those with a similar `embedding` [V, H] have.
    """
    rates = corpus.rates().clamp(1e-4, 1 - 1e-4)
    per_log2 = torch.zeros(len(HALF_LIVES), device=rates.device)
    per_log2[HALF_LIVES.index(16.0)] = _POWER * 0.6931
    predictor.by_counts.copy_(per_log2[:, None, None].expand_as(predictor.by_counts))
    predictor.base.copy_(torch.logit(rates) - per_log2.sum() * torch.log2(rates + LEAST_RATE))
    if not predictor.shape.vocab_size:
        return
    types, seen = _types(corpus)
    lift = _lift(corpus, types, 0, rates)
    axes = _main_axes(lift * seen.sqrt()[:, None], predictor.shape.token_rank)
    vectors = lift @ axes
    scale = vectors.square().mean(0).sqrt().clamp(min=1e-6)
    vectors = vectors / scale
    table = torch.zeros_like(predictor.token.weight)
    if embedding is not None:
        table = _from_embedding(vectors, types, seen, embedding.to(table), table.shape[1])
    trust = (seen / (seen + _PRIOR))[:, None] if embedding is not None else 1.0
    table[types] = trust * vectors + (1 - trust) * table[types]
    predictor.token.weight.copy_(table)
    out = [(axes * scale).T]
    for window in range(1, len(WINDOWS)):
        out.append(_fitted(vectors, _lift(corpus, types, window, rates), seen))
    predictor.token_out.weight.copy_(torch.cat([part.T for part in out]))


def _types(corpus: Corpus) -> tuple[Tensor, Tensor]:
    """Token ids of answers, the frequent ones if they are too many, and how often each was seen."""
    assert corpus.token is not None
    types, seen = torch.unique(corpus.token[corpus.decode], return_counts=True)
    most = max(_MOST // corpus.num_flat, 1)
    if len(types) > most:
        seen, kept = seen.topk(most)
        types = types[kept]
    return types, seen.float()


def _lift(corpus: Corpus, types: Tensor, window: int, rates: Tensor) -> Tensor:
    """Log odds of use in a window behind each token over those of any step, [types, N]."""
    assert corpus.token is not None
    near, far = WINDOWS[window]
    place = torch.full((int(max(corpus.token.max(), types.max())) + 1,), -1, device=types.device)
    place[types] = torch.arange(len(types), device=types.device)
    counts = torch.zeros(len(types) * corpus.num_flat, device=types.device)
    steps = torch.zeros(len(types), device=types.device)
    index = torch.arange(len(corpus), device=types.device)
    kept = corpus.decode & (place[corpus.token] >= 0) & (index + far <= corpus.end)
    for part in torch.split(index[kept], 1 << 15):
        row = place[corpus.token[part]]
        steps += torch.bincount(row, minlength=len(types)) * (far - near + 1)
        for ahead in range(near - 1, far):
            flat = (row * corpus.num_flat)[:, None] + corpus.used(part + ahead)
            counts.scatter_add_(0, flat.flatten(), counts.new_ones(1).expand(flat.numel()))
    table = counts.view(len(types), -1).add_(_PRIOR * rates)
    table /= (steps + _PRIOR)[:, None]
    return torch.logit(table.clamp_(1e-4, 1 - 1e-4)) - torch.logit(rates)


def _main_axes(rows: Tensor, rank: int) -> Tensor:
    """Orthonormal directions [N, rank] in which rows [n, N] vary most."""
    _, axes = torch.linalg.eigh(rows.T @ rows)
    axes = axes.flip(1)[:, :rank]
    return F.pad(axes, (0, rank - axes.shape[1]))


def _fitted(x: Tensor, y: Tensor, weight: Tensor, least: float = 1.0) -> Tensor:
    """Weighted least squares with a small ridge: x [n, a], y [n, b] -> [a, b] with x @ it ~ y."""
    weighted = x * weight[:, None]
    ridge = least * torch.eye(x.shape[1], device=x.device, dtype=x.dtype)
    solved: Tensor = torch.linalg.solve(weighted.T @ x + ridge, weighted.T @ y)
    return solved


def _from_embedding(
    vectors: Tensor, types: Tensor, seen: Tensor, embedding: Tensor, rank: int
) -> Tensor:
    """Vectors [V, rank] of all tokens, by a linear map from their embeddings that fits the vectors
    of the tokens that were seen."""
    x = embedding.float() - embedding.float().mean(0)
    x = x / x.square().mean().sqrt().clamp(min=1e-12)
    known = seen / (seen + _PRIOR)
    return x @ _fitted(x[types], vectors, known, least=0.1 * len(types))
