"""One training step: the student is pulled to the teacher's next-token distribution."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_model.sparse.decoder import Decoder, layer_forward, norm, rotary_table
from tools.demo_model.sparse.student import Student

NUM_CHUNKS = 4  # parts of a batch whose logits are in memory one after the other


class Losses(NamedTuple):
    """Means over tokens: KL divergence in nats; squared distance of the residual streams over
    the teacher's squared length; balance of the experts, 1 at best. Scalars."""

    divergence: Tensor
    distance: Tensor
    balance: Tensor


class Weights(NamedTuple):
    """What the secondary losses count in the sum."""

    distance: float
    balance: float


class Distiller:
    """Backpropagates a teacher's judgement of its student."""

    def __init__(self, teacher: Decoder, student: Student, compiled: bool) -> None:
        self.teacher, self.student = teacher, student
        self._layer = _compile(layer_forward) if compiled else layer_forward
        self._divergence = _compile(_divergence) if compiled else _divergence

    def backward(self, rows: Tensor, weights: Weights) -> Losses:
        """Add the gradients of rows [B, T] to the student's parameters."""
        model = self.student.decoder()
        rotary = rotary_table(model.shape, rows.shape[1], rows.device)
        with torch.no_grad():
            wanted, targets = self._teach(rows, rotary)
        x = model.embedding[rows].float()
        distance, balance = x.new_zeros(()), x.new_zeros(())
        for i, layer in enumerate(model.layers):
            experts = model.routing(i)
            x, unevenness = self._layer(x, layer, experts, model.shape, model.top_k, rotary)
            balance = balance + unevenness / len(model.layers)
            if weights.distance:
                distance = distance + relative_distance(x, targets[i]) / len(model.layers)
        hidden = norm(x, model.final_norm, model.shape.eps, model.embedding.dtype)
        divergence, gradient = self._judge(hidden.detach(), wanted)
        secondary = weights.distance * distance + weights.balance * balance
        torch.autograd.backward([hidden, secondary], [gradient, None])
        return Losses(divergence, distance.detach(), balance.detach())

    def _teach(self, rows: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The teacher's final hidden states and its residual stream behind every layer."""
        model = self.teacher
        x, targets = model.embedding[rows].float(), []
        for layer in model.layers:
            x, _ = self._layer(x, layer, None, model.shape, 0, rotary)
            targets.append(x.to(model.embedding.dtype))
        return norm(x, model.final_norm, model.shape.eps, model.embedding.dtype), targets

    def _judge(self, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Mean KL(teacher || student) and its gradient by the student's hidden states."""
        flat, target = hidden.flatten(0, 1), wanted.flatten(0, 1)
        parts = [
            self._divergence(h, t, self.teacher.embedding)
            for h, t in zip(flat.chunk(NUM_CHUNKS), target.chunk(NUM_CHUNKS), strict=True)
        ]
        total = torch.stack([part[0] for part in parts]).sum() / len(flat)
        return total, (torch.cat([part[1] for part in parts]) / len(flat)).view_as(hidden)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def relative_distance(x: Tensor, target: Tensor) -> Tensor:
    """Mean over tokens of |x - target|^2 / |target|^2."""
    target = target.float()
    return ((x - target).square().sum(-1) / target.square().sum(-1)).mean()


@torch.no_grad()
def _divergence(hidden: Tensor, wanted: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Summed KL divergence of the distributions of hidden states [S, H], and its gradient by
    `hidden`: softmax minus softmax, through the head. No graph of the logits is ever kept."""
    ours = F.linear(hidden, head).float().log_softmax(dim=-1)
    theirs = F.linear(wanted, head).float().log_softmax(dim=-1)
    target = theirs.exp()
    divergence = (target * (theirs - ours)).sum()
    return divergence, (ours.exp() - target).to(hidden.dtype) @ head
