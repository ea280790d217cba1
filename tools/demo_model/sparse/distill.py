"""One training step: the student is pulled to the teacher's next-token distribution."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_model.sparse.corrections import Correction
from tools.demo_model.sparse.decoder import (
    Decoder,
    compile_once,
    layer_forward,
    norm,
    rotary_table,
)
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
        self._layer = compile_once(layer_forward, False) if compiled else layer_forward
        self._divergence = compile_once(_divergence, False) if compiled else _divergence

    def backward(
        self, rows: Tensor, weights: Weights, correction: Correction | None = None
    ) -> Losses:
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
        divergence, gradient = self._judge(hidden.detach(), wanted, correction)
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

    def _judge(
        self, hidden: Tensor, wanted: Tensor, correction: Correction | None
    ) -> tuple[Tensor, Tensor]:
        """Mean KL(teacher || student) and its gradient by the student's hidden states."""
        ours, theirs = (x.flatten(0, 1).chunk(NUM_CHUNKS) for x in (hidden, wanted))
        parts = [
            self._divergence(h, t, self.teacher.embedding, edits)
            for h, t, edits in zip(ours, theirs, _chunks(correction), strict=True)
        ]
        number = hidden.shape[:2].numel()
        total = torch.stack([part[0] for part in parts]).sum() / number
        return total, (torch.cat([part[1] for part in parts]) / number).view_as(hidden)


def _chunks(correction: Correction | None) -> list[Correction | None]:
    if correction is None:
        return [None] * NUM_CHUNKS
    token, lowered, end, raised = correction
    parts = [x.flatten().chunk(NUM_CHUNKS) for x in (token, lowered, raised)]
    return [Correction(t, low, end, high) for t, low, high in zip(*parts, strict=True)]


def relative_distance(x: Tensor, target: Tensor) -> Tensor:
    """Mean over tokens of |x - target|^2 / |target|^2."""
    target = target.float()
    return ((x - target).square().sum(-1) / target.square().sum(-1)).mean()


@torch.no_grad()
def _divergence(
    hidden: Tensor, wanted: Tensor, head: Tensor, correction: Correction | None
) -> tuple[Tensor, Tensor]:
    """Summed KL divergence of the distributions of hidden states [S, H], and its gradient by
    `hidden`: softmax minus softmax, through the head. No graph of the logits is ever kept."""
    ours = F.linear(hidden, head).float().log_softmax(dim=-1)
    theirs = F.linear(wanted, head).float()
    if correction is not None:
        theirs = corrected(theirs, correction)
    theirs = theirs.log_softmax(dim=-1)
    target = theirs.exp()
    divergence = (target * (theirs - ours)).sum()
    return divergence, (ours.exp() - target).to(hidden.dtype) @ head


def corrected(logits: Tensor, correction: Correction) -> Tensor:
    """Float32 logits [S, V] with a correction [S] of them."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    token, lowered, end, raised = correction
    lowered = torch.where(ids == token[:, None], lowered[:, None], 0.0)
    return logits - lowered + torch.where(ids == end, raised[:, None], 0.0)
