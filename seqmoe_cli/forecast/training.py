"""Training of a predictor on traces: by the clock or by passes, with checkpoints, keeping the state
that did best on sequences that it does not learn from."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmoe_cli.errors import SeqmoeError
from seqmoe_cli.forecast.corpus import Batch, Corpus
from seqmoe_cli.forecast.predictor import Predictor, PredictorShape, State
from seqmoe_weights.files import replacing

_WINDOW_WEIGHTS = (1.0, 0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Plan:
    """How to train. It ends after `minutes`, or after `passes` over all tokens, or when the loss of
    what is held out has not fallen at `patience` looks in a row."""

    minutes: float = 10.0
    passes: int = 40
    rate: float = 1e-3
    batch_tokens: int = 8192
    length: int = 256  # steps of a row
    warm: int = 16  # of them not judged
    dropout: float = 0.1
    weight_decay: float = 0.02
    looks: int = 20  # at the held-out loss, evenly over the time
    patience: int = 4
    judged_tokens: int = 16384  # of what is held out, at a look
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """`share` of the plan that is done, from 0 to 1; losses in nats per expert and window."""

    share: float
    passes: float
    tokens: int
    loss: float
    held_out_loss: float


class Training:
    """Step by step: `run` goes on from wherever the last checkpoint was."""

    def __init__(
        self, predictor: Predictor, learned: Corpus, held_out: Corpus, plan: Plan,
        checkpoint: Path | None = None,
    ) -> None:  # fmt: skip
        self.predictor, self.plan = predictor, plan
        self._learned, self._held_out, self._checkpoint = learned, held_out, checkpoint
        self._device = predictor.base.device
        decayed = [w for w in predictor.parameters() if w.ndim > 1]
        plain = [w for w in predictor.parameters() if w.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": plan.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, plan.rate, betas=(0.9, 0.98))
        self._best = copy.deepcopy(predictor.state_dict())
        self._state: dict[str, Any] = {
            "seconds": 0.0, "pass": 0, "row": 0, "tokens": 0, "looks": 0, "failed": 0,
            "loss": math.nan, "best": math.inf,
        }  # fmt: skip
        if checkpoint and checkpoint.exists():
            self._load(checkpoint)

    def run(self, tell: Callable[[Progress], None] | None = None) -> Predictor:
        """Train to the end; the predictor then is the best that there was. `tell` is called after
        every batch."""
        plan, state = self.plan, self._state
        per_batch = max(plan.batch_tokens // plan.length, 1)
        began = time.perf_counter() - state["seconds"]
        while not self._is_over():
            generator = torch.Generator().manual_seed(plan.seed + 7919 * state["pass"])
            rows = self._learned.rows(plan.length, generator)
            for starts in torch.split(rows[state["row"] :], per_batch):
                self._learn(starts)
                state["row"] += len(starts)
                state["done"] = state["pass"] + state["row"] / len(rows)
                if state["row"] == len(rows):
                    state["pass"], state["row"] = state["pass"] + 1, 0
                state["seconds"] = time.perf_counter() - began
                share = self._share()
                if share >= (state["looks"] + 1) / plan.looks or share >= 1:
                    self._look(share)
                if tell:
                    tell(self.progress())
                if self._is_over():
                    break
        self.predictor.load_state_dict(self._best)
        return self.predictor.eval()

    def _is_over(self) -> bool:
        return self._share() >= 1 or bool(self._state["failed"] >= self.plan.patience)

    def _share(self) -> float:
        """Of the plan that is done."""
        by_time = self._state["seconds"] / (60 * self.plan.minutes)
        by_passes = self._state.get("done", 0.0) / self.plan.passes
        return float(min(max(by_time, by_passes), 1.0))

    def _learn(self, starts: Tensor) -> None:
        plan, state = self.plan, self._state
        self.predictor.train()
        share = self._share()
        cooled = 0.02 + 0.98 * (1 + math.cos(math.pi * share)) / 2
        rate = plan.rate * min(1, 50 * share + 0.02) * cooled
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        batch = self._learned.batch(starts, plan.length, plan.warm)
        loss = _loss(self.predictor, batch)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.predictor.parameters(), 1.0)
        self._optimizer.step()
        now = loss.item() / sum(_WINDOW_WEIGHTS)
        state["loss"] = now if math.isnan(state["loss"]) else 0.95 * state["loss"] + 0.05 * now
        state["tokens"] += int(batch.counted[..., 0].sum())

    def _look(self, share: float) -> None:
        """Judge, remember the best, and save everything."""
        state = self._state
        state["looks"] = int(share * self.plan.looks)
        loss = self.held_out_loss()
        state["held_out"] = loss
        if loss < state["best"]:
            state["best"], state["failed"] = loss, 0
            self._best = copy.deepcopy(self.predictor.state_dict())
        else:
            state["failed"] += 1
        if self._checkpoint:
            self._save(self._checkpoint)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean over the windows, on the first tokens that are held out."""
        self.predictor.eval()
        plan, corpus = self.plan, self._held_out
        rows = [
            start
            for first, end in zip(corpus.starts.tolist(), corpus.ends.tolist(), strict=True)
            for start in range(first, end, plan.length)
        ][: max(plan.judged_tokens // plan.length, 1)]
        total = torch.zeros(2, device=self._device)
        for starts in torch.split(torch.tensor(rows), max(plan.batch_tokens // plan.length, 1)):
            batch = corpus.batch(starts, plan.length, plan.warm)
            share = float(batch.counted.sum())
            loss = _loss(self.predictor, batch)
            total += torch.stack((loss * share, loss.new_tensor(share)))
        return float(total[0] / total[1].clamp(min=1)) / sum(_WINDOW_WEIGHTS)

    def progress(self) -> Progress:
        """Where the training stands."""
        state = self._state
        return Progress(
            self._share(), state.get("done", 0.0), state["tokens"], state["loss"], state["best"]
        )

    def _save(self, path: Path) -> None:
        whole = {
            "state": self._state,
            "shape": self.predictor.shape.as_dict(),
            "predictor": self.predictor.state_dict(),
            "best": self._best,
            "optimizer": self._optimizer.state_dict(),
        }
        with replacing(path) as file:
            torch.save(whole, file)

    def _load(self, path: Path) -> None:
        hint = "remove it, or give another --checkpoint"
        try:
            whole = torch.load(path, map_location=self._device, weights_only=True)
            if PredictorShape.from_dict(whole["shape"]) != self.predictor.shape:
                raise SeqmoeError(f"{path} is of a predictor of another shape", hint)
            self.predictor.load_state_dict(whole["predictor"])
            self._optimizer.load_state_dict(whole["optimizer"])
            self._best, self._state = whole["best"], self._state | whole["state"]
        except SeqmoeError:
            raise
        except Exception as error:  # a damaged archive fails in many ways
            raise SeqmoeError(f"{path} is no checkpoint of a training: {error}", hint) from error


def _loss(predictor: Predictor, batch: Batch) -> Tensor:
    """Cross entropy per expert, over the steps of a batch that count, summed over the windows by
    their weights."""
    start = predictor.start(len(batch.counts))
    bfloat16 = batch.target.device.type == "cuda"
    with torch.autocast(batch.target.device.type, torch.bfloat16, bfloat16):
        logits, _ = predictor(batch.inputs, State(start.recurrent, batch.counts))
    loss = F.binary_cross_entropy_with_logits(logits, batch.target, reduction="none").mean(-1)
    counted = batch.counted.to(loss.dtype)
    by_window = (loss * counted).sum((0, 1)) / counted.sum((0, 1)).clamp(min=1)
    return by_window @ by_window.new_tensor(_WINDOW_WEIGHTS)
