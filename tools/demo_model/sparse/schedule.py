"""Training over time: learning rates, the narrowing of the experts, the weights of the losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

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


class Training:
    """The schedule: learning rates, width of the experts and weights of the losses over time."""

    def __init__(self, teacher: Decoder, student: Student, options: Any, rate: float) -> None:
        self.teacher, self.student, self.options, self.rate = teacher, student, options, rate
        self._width = student.shape.ffn
        self._distiller = Distiller(teacher, student, options.compile)
        p = student.parameters
        groups = {
            "low-rank": [t for name, t in p.items() if name[-2:] in (".a", ".b")],
            "norm": [t for name, t in p.items() if name.endswith("norm")],
            "router": [p["router"]],
            "scale": [p["scale"]],
        }
        self._optimizer = torch.optim.AdamW(
            [{"params": groups[name], "lr": 0.0, "name": name} for name in groups],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=teacher.embedding.is_cuda,
        )

    def run(self, text: Text, clock: Clock, seconds: float) -> dict[str, Any]:
        """Train for `seconds`; at the end the experts have the width wanted."""
        begun, batches, num_rows = clock.seconds(), Batches(text), self.options.batch_rows
        step, tokens = 0, 0
        while (share := (clock.seconds() - begun) / seconds) < 1:
            if step % PRUNE_EVERY == 0:
                self.narrow(batches, share)
            rows = batches.next(num_rows)
            try:
                losses, length = self.step(rows, share)
            except torch.OutOfMemoryError:
                num_rows //= 2
                self._optimizer.zero_grad()
                clock.log(f"out of memory: on with {num_rows} rows a step")
                continue
            step, tokens = step + 1, tokens + rows.numel()
            if step % REPORT_EVERY == 0 or step in (1, 10):
                figures = " ".join(f"{k} {v:.4f}" for k, v in losses._asdict().items())
                state = f"step {step} {share:.2f} {tokens / 1e6:.1f} M, width {self._width}"
                clock.log(f"{state}, {figures}, gradient {length:.3f}")
            if step % COMPARE_EVERY == 0:
                clock.log(f"held out: {self.ratios(text)}")
        self.narrow(batches, 1.0)
        ratios = self.ratios(text)
        clock.log(f"trained {step} steps; held out: {ratios}")
        return {"steps": step, "tokens": tokens, "seconds": seconds, "ratios": ratios}

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
        losses = self._distiller.backward(rows, weights)
        length = torch.nn.utils.clip_grad_norm_(self.student.parameters.values(), 1.0).item()
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
