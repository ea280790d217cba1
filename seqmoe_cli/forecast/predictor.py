"""Predictor: which experts the coming steps will use, from the steps so far and the next token.

B sequences, T steps, L layers of E experts, K of them used by a step, N = L * E flat expert ids, W
windows of steps ahead, J half-lives, D the width. The id N stands for "none".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqmoe_cli.errors import SeqmoeError
from seqmoe_kernels.eviction.units import WINDOWS as WINDOWS

FORMAT, FORMAT_VERSION = "seqmoe-predictor", 1
HALF_LIVES = (2.0, 16.0, 128.0)  # steps, of the counts that the predictor keeps
LEAST_RATE = 0.01  # uses per step, added before a logarithm is taken
MAX_BYTES = 64 * 10**6
NUM_BLOCKS = 2


@dataclass(frozen=True)
class PredictorShape:
    """`vocab_size` 0: token ids are not known."""

    num_layers: int
    num_experts: int  # of one layer
    top_k: int
    vocab_size: int = 0
    token_rank: int = 0
    width: int = 768

    @property
    def num_flat(self) -> int:
        return self.num_layers * self.num_experts

    @property
    def num_used(self) -> int:
        """Experts that a step uses in all layers."""
        return self.num_layers * self.top_k

    @property
    def num_bytes(self) -> int:
        """Size of the weights, stored in bfloat16."""
        with torch.device("meta"):
            return 2 * sum(weight.numel() for weight in Predictor(self).parameters())

    @classmethod
    def fitting(cls, **sizes: int) -> PredictorShape:
        """The sizes given, with the largest rank of the token table, 128 at most, that keeps the
        whole below `MAX_BYTES`. Raises `SeqmoeError` when even a rank of 16 is too large."""
        for rank in range(128, 0, -16) if sizes.get("vocab_size") else [0]:
            shape = cls(**sizes, token_rank=rank)
            if shape.num_bytes <= MAX_BYTES:
                return shape
        raise SeqmoeError(
            f"a predictor of width {shape.width} would have {shape.num_bytes / 1e6:.0f} MB, "
            f"{MAX_BYTES / 1e6:.0f} are the limit",
            "give a smaller --width",
        )

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, sizes: dict[str, Any]) -> PredictorShape:
        """Raises `ValueError` for anything that `as_dict` does not give; older ones gave
        `hidden_rank`, too."""
        if sizes.get("hidden_rank", 0) != 0:
            raise ValueError("it reads hidden states, which an engine does not show")
        sizes = {name: size for name, size in sizes.items() if name != "hidden_rank"}
        names = {field.name for field in fields(cls)}
        if set(sizes) != names or not all(type(size) is int for size in sizes.values()):
            raise ValueError(f"its sizes are {sizes}")
        if min(sizes.values()) < 0 or not 0 < sizes["top_k"] <= sizes["num_experts"]:
            raise ValueError(f"its sizes are {sizes}")
        return cls(**sizes)


class Inputs(NamedTuple):
    """What is known when each step begins; what a predictor has no use for is ignored.

    `used` int64 [B, T, L * K]: flat ids of the step before, N where there was none. `token` int64
    [B, T], the one that the step evaluates.
    """

    used: Tensor
    token: Tensor | None = None


class State(NamedTuple):
    """Between two steps: `recurrent` f32 [blocks, B, D], decayed `counts` of uses f32 [B, J, N]."""

    recurrent: Tensor
    counts: Tensor


class Predictor(nn.Module):
    """The sum of learned vectors for all that is known goes through two recurrent blocks; a head
    for each window turns the result into a vector that is compared with one for each expert. Beside
    that, two things go into the logits directly: logarithms of decayed counts, so that the network
    need not remember by itself how often each expert was used, and what the token alone says, a
    table of low rank. With these `beginning.py` lets the training start where counting ends.

    The sigmoid of a logit is the share of a window's steps that will use the expert.
    """

    decay: Tensor

    def __init__(self, shape: PredictorShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, width = shape, shape.width
        self.used = nn.EmbeddingBag(shape.num_flat, width, mode="sum")
        nn.init.normal_(self.used.weight, std=shape.num_used**-0.5)
        if shape.vocab_size:
            self.token = nn.Embedding(shape.vocab_size, shape.token_rank)
            self.token_in = nn.Linear(shape.token_rank, width, bias=False)
            self.token_out = nn.Linear(shape.token_rank, len(WINDOWS) * shape.num_flat, bias=False)
            nn.init.normal_(self.token_in.weight, std=shape.token_rank**-0.5)
            nn.init.zeros_(self.token_out.weight)
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-5) for _ in range(NUM_BLOCKS + 1))
        self.blocks = nn.ModuleList(
            nn.GRU(width, width, batch_first=True) for _ in range(NUM_BLOCKS)
        )
        self.heads = nn.Linear(width, len(WINDOWS) * width)
        self.experts = nn.Linear(width, shape.num_flat, bias=False)
        nn.init.normal_(self.experts.weight, std=0.1 * width**-0.5)
        self.base = nn.Parameter(torch.zeros(len(WINDOWS), shape.num_flat))
        by_counts = torch.zeros(len(HALF_LIVES), len(WINDOWS), shape.num_layers)
        by_counts[1] = 0.5
        self.by_counts = nn.Parameter(by_counts)
        self.dropout = nn.Dropout(dropout)
        decay = torch.tensor([2 ** (-1 / half_life) for half_life in HALF_LIVES])
        self.register_buffer("decay", decay, persistent=False)

    def start(self, num_sequences: int) -> State:
        """Before the first step."""
        device = self.base.device
        return State(
            torch.zeros(NUM_BLOCKS, num_sequences, self.shape.width, device=device),
            torch.zeros(num_sequences, len(HALF_LIVES), self.shape.num_flat, device=device),
        )

    def forward(self, inputs: Inputs, state: State) -> tuple[Tensor, State]:
        """Logits [B, T, W, N] and the state behind the last step."""
        x, recurrent = self.dropout(self._input(inputs)), []
        for block, norm, h in zip(self.blocks, self.norms, state.recurrent, strict=False):
            with _exact(x):  # cuDNN would take float16 for it, which is too narrow for gradients
                y, h = block(norm(x.float()), h.unsqueeze(0))
            x = x + self.dropout(y)
            recurrent.append(h[0].float())
        z = self.norms[-1](x)
        logs, counts = self._logs(inputs.used, state.counts)
        windows = z.unsqueeze(-2) + by_window(F.silu(self.heads(z)))
        logits = self.experts(self.dropout(windows)).float() + self.base
        logits = logits + self._from_counts(logs)
        if self.shape.vocab_size:
            logits = logits + by_window(self.token_out(self.token(inputs.token))).float()
        return logits, State(torch.stack(recurrent), counts)

    def _input(self, inputs: Inputs) -> Tensor:
        """[B, T, D]"""
        flat, there = inputs.used.flatten(0, 1), inputs.used[..., 0] < self.shape.num_flat
        x: Tensor = self.used(flat.clamp(max=self.shape.num_flat - 1)).view(*there.shape, -1)
        x = x * there.unsqueeze(-1)
        if self.shape.vocab_size:
            assert inputs.token is not None
            x = x + self.token_in(self.token(inputs.token))
        return x

    @torch.no_grad()
    def _logs(self, used: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of the decayed rates of use in every step, [B, T, J, N], and the counts [B, J,
        N] after the last one."""
        batch, steps, num_used = used.shape
        padded = F.pad(counts, (0, 1))  # a column for "none"
        ones = padded.new_ones(1).expand(batch, len(HALF_LIVES), num_used)
        seen = padded.new_empty(batch, steps, *counts.shape[1:])
        for step in range(steps):
            index = used[:, step, None].expand_as(ones)
            padded = (padded * self.decay[:, None]).scatter_add(2, index, ones)
            seen[:, step] = padded[..., :-1]
        logs = torch.log2(seen * (1 - self.decay)[:, None] + LEAST_RATE)
        return logs, padded[..., :-1].contiguous()

    def _from_counts(self, logs: Tensor) -> Tensor:
        """[B, T, J, N] -> [B, T, W, N]"""
        by_layer = torch.unflatten(logs, -1, (self.shape.num_layers, -1))
        with _exact(logs):
            return torch.einsum("btjle,jwl->btwle", by_layer, self.by_counts).flatten(-2)


def _exact(x: Tensor) -> torch.autocast:
    """Within it, nothing is rounded to a narrower type."""
    return torch.autocast(x.device.type, enabled=False)


def by_window(x: Tensor) -> Tensor:
    """[..., W * n] -> [..., W, n]"""
    return torch.unflatten(x, -1, (len(WINDOWS), -1))


def expected_uses(logits: Tensor) -> Tensor:
    """Uses in each window, [..., W, N], from logits [..., W, N]."""
    widths = logits.new_tensor([last - first + 1 for first, last in WINDOWS])
    return logits.sigmoid() * widths[:, None]
