"""Training over time: learning rates, the narrowing of the experts, the weights of the losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tools.demo_model.sparse.corrections import Marks, correct
from tools.demo_model.sparse.decoder import Decoder
from tools.demo_model.sparse.distill import Distiller, Losses, Weights
from tools.demo_model.sparse.evaluate import perplexity
from tools.demo_model.sparse.routing import prune, saliency
from tools.demo_model.sparse.student import Student
from tools.demo_model.sparse.text import Batches, Text
from tools.demo_model.sparse.writer import Clock

RATES = {"low-rank": 1e-3, "norm": 1e-3, "router": 4e-3, "scale": 1e-2}
WARM_UP, PRUNED_AT = 0.04, 0.35  # shares of the training time
PRUNE_EVERY, REPORT_EVERY, COMPARE_EVERY = 5, 50, 400  # steps


@dataclass(frozen=True)
class Corrected:
    """Whose rows have the teacher's logits corrected: the `share` of a batch that comes first."""

    marks: Marks
    share: float


class Training:
    """The schedule: learning rates, width of the experts and weights of the losses over the time
    from the making of this object on."""

    def __init__(
        self,
        teacher: Decoder,
        student: Student,
        options: Any,
        rate: float,
        clock: Clock,
        seconds: float,
        corrected: Corrected | None = None,
    ) -> None:
        self.teacher, self.student, self.options, self.rate = teacher, student, options, rate
        self._clock, self._begun, self._seconds = clock, clock.seconds(), seconds
        self._corrected = corrected
        self._width = int(student.support[0, 0].sum())
        self._num_rows: int = options.batch_rows
        self._steps, self._tokens = 0, 0
        self._distiller = Distiller(teacher, student, options.compile)
        self._trained = [t for t in student.parameters.values() if t.requires_grad]
        self._optimizer = torch.optim.AdamW(
            [{"params": group, "lr": 0.0, "name": name} for name, group in self._groups().items()],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=teacher.embedding.is_cuda,
        )

    def _groups(self) -> dict[str, list[Tensor]]:
        p = {name: t for name, t in self.student.parameters.items() if t.requires_grad}
        return {
            "low-rank": [t for name, t in p.items() if name[-2:] in (".a", ".b")],
            "norm": [t for name, t in p.items() if name.endswith("norm")],
            "router": [p["router"]],
            "scale": [p["scale"]],
        }

    def run(self, batches: Batches, text: Text, until: float = 1.0) -> dict[str, Any]:
        """Train until a share of the time is over; at its end the experts have the width wanted.

        Returns what was done so far.
        """
        while (share := self._share()) < until:
            if self._steps % PRUNE_EVERY == 0:
                self.narrow(batches, share)
            rows = batches.next(self._num_rows)
            try:
                losses, length = self.step(rows, share)
            except torch.OutOfMemoryError:
                self._num_rows //= 2
                self._optimizer.zero_grad()
                self._clock.log(f"out of memory: on with {self._num_rows} rows a step")
                continue
            self._steps, self._tokens = self._steps + 1, self._tokens + rows.numel()
            self._report(share, losses, length, text)
        self.narrow(batches, until)
        ratios = self.ratios(text)
        self._clock.log(f"trained {self._steps} steps; held out: {ratios}")
        return {
            "steps": self._steps,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "ratios": ratios,
        }

    def _share(self) -> float:
        return (self._clock.seconds() - self._begun) / self._seconds

    def _report(self, share: float, losses: Losses, length: float, text: Text) -> None:
        step, tokens = self._steps, self._tokens
        if step % REPORT_EVERY == 0 or step in (1, 10):
            figures = " ".join(f"{k} {v:.4f}" for k, v in losses._asdict().items())
            state = f"step {step} {share:.2f} {tokens / 1e6:.1f} M, width {self._width}"
            self._clock.log(f"{state}, {figures}, gradient {length:.3f}")
        if step % COMPARE_EVERY == 0:
            self._clock.log(f"held out: {self.ratios(text)}")

    def narrow(self, batches: Batches, share: float) -> None:
        """Bring the experts to the width that belongs to a share of the time."""
        width = self.width(share)
        if width < self._width:
            rows = batches.next(self.options.batch_rows // 2)
            prune(self.student, saliency(self.student.decoder(), rows), width)
            self._width = width

    def width(self, share: float) -> int:
        """Neurons an expert holds at a share of the time: all of them, then ever fewer."""
        full, final = self.teacher.shape.ffn, int(self.options.width)
        left = max(0.0, 1 - share / PRUNED_AT)
        return int(final + (full - final) * left**3)

    def step(self, rows: Tensor, share: float) -> tuple[Losses, float]:
        """One optimizer step; also the length of the gradient, before it is clipped."""
        rate = min(1.0, share / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * share))
        for group in self._optimizer.param_groups:
            group["lr"] = RATES[group["name"]] * self.rate * rate
        weights = Weights(self.options.distance * (1 - share), self.options.balance)
        correction = None
        if self._corrected is not None:
            number = round(len(rows) * self._corrected.share)
            correction = correct(rows, self._corrected.marks, number)
        losses = self._distiller.backward(rows, weights, correction)
        length = torch.nn.utils.clip_grad_norm_(self._trained, 1.0).item()
        if math.isfinite(length):
            self._optimizer.step()
        self._optimizer.zero_grad()
        return losses, length

    def ratios(self, text: Text) -> dict[str, float]:
        """The student's perplexity over the teacher's, on a little of the text held out."""
        model, few = self.student.decoder(), slice(0, 24)
        rows = {"chats": text.held_out_chats[few], "corpus": text.held_out_corpus[few]}
        return {
            name: round(perplexity(model, held) / perplexity(self.teacher, held), 4)
            for name, held in rows.items()
        }
