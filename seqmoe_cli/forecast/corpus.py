"""Corpus: traces as tensors, cut by sequence into a part to learn from and a part that is held out.

T tokens of all sequences one behind the other; the letters of `predictor.py` for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seqmoe_cli.errors import SeqmoeError
from seqmoe_cli.forecast.predictor import HALF_LIVES, WINDOWS, Inputs
from seqmoe_cli.forecast.trace import DECODE, Trace

HELD_OUT = 10  # one sequence in so many
SPAN = WINDOWS[-1][1]
_HISTORY = 256  # steps that the counts at the start of a row are made from


@dataclass(frozen=True)
class Batch:
    """Rows of T steps. `target` [B, T, W, N]: the share of the window's steps that use an expert;
    `counted` [B, T, W]: where it is known and matters. `counts` [B, J, N]: those at the start."""

    inputs: Inputs
    counts: Tensor
    target: Tensor
    counted: Tensor


class Corpus:
    """The tokens of a trace on a device. `experts` [T, L, K] flat ids, `first` and `end` [T]: where
    the sequence of each token begins and ends."""

    def __init__(self, trace: Trace, device: torch.device) -> None:
        self.num_flat = trace.num_layers * trace.num_experts
        offsets = torch.arange(trace.num_layers, device=device) * trace.num_experts
        experts = torch.from_numpy(trace.experts.astype(np.int16)).to(device)
        self._offsets, self._experts = offsets[:, None], experts
        lengths = np.diff(trace.starts, append=len(trace))
        self.starts, self.ends = trace.starts, trace.starts + lengths
        self.first = torch.from_numpy(np.repeat(self.starts, lengths)).to(device)
        self.end = torch.from_numpy(np.repeat(self.ends, lengths)).to(device)
        self.decode = torch.from_numpy(trace.phase == DECODE).to(device)
        self.token: Tensor | None = None
        if trace.token_ids is not None:
            self.token = torch.from_numpy(trace.token_ids.astype(np.int64)).to(device)

    def __len__(self) -> int:
        return len(self._experts)

    @property
    def num_targets(self) -> int:
        """Tokens of answers: their routing is learned or judged."""
        return int(self.decode.sum())

    def used(self, index: Tensor) -> Tensor:
        """Flat ids [..., L * K] of the tokens `index` [...]."""
        return (self._experts[index].long() + self._offsets).flatten(-2)

    def rates(self) -> Tensor:
        """Uses per step of each expert, [N]."""
        uses = torch.zeros(self.num_flat, device=self._experts.device)
        for part in torch.split(torch.arange(len(self), device=uses.device), 1 << 16):
            uses += torch.bincount(self.used(part).flatten(), minlength=self.num_flat)
        return uses / max(len(self), 1)

    def inputs(self, index: Tensor) -> Inputs:
        """For tokens `index` [B, T], each as the one that a step is about to evaluate."""
        there = index > self.first[index]
        before = (index - 1).clamp(min=0)
        used = torch.where(there.unsqueeze(-1), self.used(before), self.num_flat)
        return Inputs(used, None if self.token is None else self.token[index])

    def rows(self, length: int, generator: torch.Generator) -> Tensor:
        """Starts of rows that tile the sequences, each shifted by chance, in random order."""
        found: list[int] = []
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            shift = int(torch.randint(length, (1,), generator=generator)) if end - start > 1 else 0
            found += (
                [start, *range(start + shift, end - 1, length)]
                if shift
                else range(start, end, length)
            )
        rows = torch.tensor(found)
        return rows[torch.randperm(len(rows), generator=generator)]

    def batch(self, starts: Tensor, length: int, warm: int) -> Batch:
        """Rows from `starts` [B]. A row that begins within a sequence is not judged for its first
        `warm` steps, in which the recurrent state gets warm."""
        device = self.first.device
        starts = starts.to(device)
        index = starts[:, None] + torch.arange(length + SPAN - 1, device=device)
        end = self.end[starts][:, None]
        inside = index < end
        index = torch.where(inside, index, end - 1)
        hot = torch.zeros(*index.shape, self.num_flat, device=device)
        hot.scatter_(2, self.used(index), inside.float().unsqueeze(-1).expand(-1, -1, self._width))
        now, ahead = index[:, :length], torch.arange(length, device=device)
        judged = self.decode[now] & inside[:, :length]
        judged &= (ahead >= warm) | (starts == self.first[starts])[:, None]
        target = torch.stack([_mean(hot, length, *window) for window in WINDOWS], 2)
        known = [starts[:, None] + ahead + last - 1 < end for _, last in WINDOWS]
        counted = torch.stack(known, 2) & judged.unsqueeze(-1)
        return Batch(self.inputs(now), self._counts(starts), target, counted)

    @property
    def _width(self) -> int:
        return self._experts.shape[1] * self._experts.shape[2]

    def _counts(self, starts: Tensor) -> Tensor:
        """Decayed counts [B, J, N] of the steps before the one before each start, which is an input
        of its own."""
        back = torch.arange(_HISTORY, device=starts.device)
        index = starts[:, None] - 2 - back
        there = index >= self.first[starts][:, None]
        used = self.used(index.clamp(min=0)).flatten(1)  # [B, history * L * K]
        weights = [2 ** (-back / half_life) * there for half_life in HALF_LIVES]
        source = torch.stack(weights, 1).repeat_interleave(self._width, 2)
        counts = torch.zeros(len(starts), len(HALF_LIVES), self.num_flat, device=starts.device)
        return counts.scatter_add_(2, used[:, None].expand_as(source), source)


def divide(trace: Trace) -> tuple[Trace, Trace]:
    """What is learned from, and what is held out: the last tenth of the sequences, or of a single
    one its last quarter. Raises `SeqmoeError` for a trace that is too short for that."""
    names, place = np.unique(trace.sequence, return_inverse=True)
    if len(names) > 1:
        held = place >= len(names) - max(len(names) // HELD_OUT, 1)
    else:
        held = np.arange(len(trace)) >= len(trace) - len(trace) // 4
    learned, kept = trace.select(~held), trace.select(held)
    for part in (learned, kept):
        if int((part.phase == DECODE).sum()) <= SPAN:
            raise SeqmoeError(
                f"{len(trace):,} tokens of {trace.model} are too few to learn from",
                "record more: answers are learned from, not prompts",
            )
    return learned, kept


def joined(traces: Sequence[Trace]) -> Trace:
    """One trace of several of the same model, with what is learned from. Raises `SeqmoeError` when
    their shapes or weights differ."""
    shapes = {(trace.num_layers, trace.num_experts, trace.top_k) for trace in traces}
    if len(shapes) > 1:
        raise SeqmoeError("the traces are of models of different shapes", "give those of one model")
    known = {trace.weights_sha256 for trace in traces} - {None}
    if len(known) > 1:
        raise SeqmoeError("the traces are of different models", "give those of one model")
    token_ids = [trace.token_ids for trace in traces if trace.token_ids is not None]
    starts = np.concatenate([np.isin(np.arange(len(trace)), trace.starts) for trace in traces])
    return Trace(
        traces[0].model,
        traces[0].family,
        traces[0].num_experts,
        np.concatenate([trace.experts for trace in traces]),
        (np.cumsum(starts) - 1).astype(np.uint32),
        np.concatenate([trace.phase for trace in traces]),
        np.concatenate(token_ids) if len(token_ids) == len(traces) else None,
        weights_sha256=next(iter(known), None),
    )


def check_fits(trace: Trace, shape: tuple[int, int, int], vocab_size: int, of: str) -> None:
    """Raise `SeqmoeError` for a trace of another shape (layers, experts of a layer, used of them),
    or with token ids of `vocab_size` or more, if that is not 0."""
    found = (trace.num_layers, trace.num_experts, trace.top_k)
    largest = 0 if trace.token_ids is None else int(trace.token_ids.max(initial=0))
    if found != shape:
        layers = "{} layers of {} experts, {} used"
        problem = f"{layers.format(*found)}; {of} {layers.format(*shape)}"
    elif 0 < vocab_size <= largest:
        problem = f"the token id {largest}; {of} {vocab_size:,} tokens"
    else:
        return
    raise SeqmoeError(f"the trace of {trace.model} has {problem}", "give a trace of the same model")


def _mean(hot: Tensor, length: int, first: int, last: int) -> Tensor:
    """The share of the steps `first` to `last` ahead that use each expert, [B, length, N]."""
    steps = [hot[:, ahead - 1 : ahead - 1 + length] for ahead in range(first, last + 1)]
    return torch.stack(steps).mean(0) if len(steps) > 1 else steps[0]
