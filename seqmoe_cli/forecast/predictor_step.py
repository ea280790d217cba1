"""PredictorStep: the predictor one step at a time, in place, so that a CUDA graph can hold it."""

from __future__ import annotations

import copy

import torch
from torch import nn

from seqmoe_cli.forecast.predictor import HALF_LIVES, NUM_BLOCKS, WINDOWS, Predictor, State
from seqmoe_kernels import (
    ExpertHeads,
    GruWeights,
    Norm,
    StepInput,
    TokenInput,
    UseHistory,
    expected_uses,
    gru_step,
    sum_rows,
    window_vectors,
)


class PredictorStep:
    """Everything it reads and writes stays at its address; nothing is read back by the host.

    Before a call the caller fills `used` int32 [L * K] with the flat ids of the step that is over,
    layer by layer (N, the number of flat ids, where there was none), and `token` int64 [1] with the
    token that the next step evaluates. After it `expected` f32 [W, N] holds how often each expert
    will be used in each window.
    """

    def __init__(self, predictor: Predictor, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` is that of the weights; sums and states are float32."""
        shape = predictor.shape
        net = copy.deepcopy(predictor).to(device, dtype).eval().requires_grad_(False)
        self._net, self._num_flat = net, shape.num_flat
        self.used = torch.full((shape.num_used,), shape.num_flat, dtype=torch.int32, device=device)
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.expected = torch.zeros(len(WINDOWS), shape.num_flat, device=device)
        self._history = UseHistory(
            torch.zeros(len(HALF_LIVES), shape.num_flat, device=device),
            torch.zeros(2, NUM_BLOCKS, shape.width, device=device),
        )
        self._norms = [_norm(norm) for norm in net.norms]
        self._blocks = [_weights(block) for block in net.blocks]
        self._heads = ExpertHeads(
            net.experts.weight,
            predictor.base.detach().to(device),
            predictor.by_counts.detach().to(device),
            predictor.decay.to(device, torch.float32),
            torch.tensor([last - first + 1.0 for first, last in WINDOWS], device=device),
        )
        self._token_in = self._token_out = None
        if shape.vocab_size:
            self._token_in = TokenInput(net.token.weight, net.token_in.weight)
            self._token_out = TokenInput(net.token.weight, net.token_out.weight)

    def load(self, state: State) -> None:
        """Go on from a state of one sequence, as the sequence form leaves it behind a prompt."""
        self._history.states.copy_(state.recurrent[:, 0].expand_as(self._history.states))
        self._history.counts.copy_(state.counts[0])

    def reset(self) -> None:
        """Nothing is known of the past."""
        self._history.states.zero_()
        self._history.counts.zero_()
        self.used.fill_(self._num_flat)

    @torch.no_grad()
    def __call__(self) -> None:
        """Five launches on a GPU."""
        past, present = self._history.states
        step = StepInput(self.used, self.token, self._token_in)
        x = sum_rows(self._net.used.weight, step)
        for n, weights in enumerate(self._blocks):
            x = gru_step(x, self._norms[n], weights, past[n], present[n])
        vectors = window_vectors(x, self._norms[-1], self._net.heads.weight, self._net.heads.bias)
        step = step._replace(token_input=self._token_out)
        expected_uses(vectors, self._heads, step, self._history, self.expected)


def _norm(norm: nn.Module) -> Norm:
    assert isinstance(norm, nn.RMSNorm) and norm.weight is not None and norm.eps is not None
    return Norm(norm.weight, norm.eps)


def _weights(block: nn.Module) -> GruWeights:
    assert isinstance(block, nn.GRU)
    return GruWeights(*block.all_weights[0])
