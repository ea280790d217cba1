"""PredictorStep: the predictor one step at a time, in place, so that a CUDA graph can hold it."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqmoe_cli.forecast.predictor import (
    HALF_LIVES,
    NUM_BLOCKS,
    WINDOWS,
    Predictor,
    State,
    expected_uses,
)


class PredictorStep:
    """Everything it reads and writes stays at its address; nothing is read back by the host.

    Before a call the caller fills `used` int64 [L * K] with the flat ids of the step that is over
    (N, the number of flat ids, where there was none), `token` int64 [1] with the token that the
    next step evaluates, and `hidden` f32 [R] with the final hidden state behind the step that is
    over. After it `expected` f32 [W, N] holds how often each expert will be used in each window.
    """

    def __init__(self, predictor: Predictor, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` is that of the weights; sums and states are float32."""
        shape = predictor.shape
        self._predictor = copy.deepcopy(predictor).to(device, dtype).eval().requires_grad_(False)
        self._predictor.decay = predictor.decay.to(device, torch.float32)
        self.used = torch.full((shape.num_used,), shape.num_flat, device=device)
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(shape.hidden_rank, device=device)
        self.expected = torch.zeros(len(WINDOWS), shape.num_flat, device=device)
        self._recurrent = torch.zeros(NUM_BLOCKS, shape.width, device=device)
        self._counts = torch.zeros(len(HALF_LIVES), shape.num_flat + 1, device=device)
        self._ones = torch.ones(len(HALF_LIVES), shape.num_used, device=device)

    def load(self, state: State) -> None:
        """Go on from a state of one sequence, as the sequence form leaves it behind a prompt."""
        self._recurrent.copy_(state.recurrent[:, 0])
        self._counts[:, :-1].copy_(state.counts[0])

    def reset(self) -> None:
        """Nothing is known of the past."""
        self._recurrent.zero_()
        self._counts.zero_()
        self.used.fill_(self._predictor.shape.num_flat)

    @torch.no_grad()
    def __call__(self) -> None:
        net = self._predictor
        x = self._input()
        for n in range(NUM_BLOCKS):
            x = x + self._block(n, net.norms[n](x))
        vectors = net._windows(net.norms[-1](x))
        logits = net.experts(vectors).float() + net.base.float()
        self._counts.mul_(net.decay[:, None])
        self._counts.scatter_add_(1, self.used.expand_as(self._ones), self._ones)
        logs = torch.unflatten(net.log_rates(self._counts[:, :-1]), -1, (net.shape.num_layers, -1))
        logits += torch.einsum("jle,jwl->wle", logs, net.by_counts.float()).flatten(-2)
        if net.shape.vocab_size:
            logits += net._from_token(net.token(self.token)[0]).float()
        self.expected.copy_(expected_uses(logits))

    def _input(self) -> Tensor:
        """[D]"""
        net, num_flat = self._predictor, self._predictor.shape.num_flat
        there = self.used[:1] < num_flat
        rows = net.used.weight[self.used.clamp(max=num_flat - 1)]
        x = rows.float().sum(0) * there
        if net.shape.vocab_size:
            x = x + net.token_in(net.token(self.token)[0])
        if net.shape.hidden_rank:
            hidden = net.hidden_norm(self.hidden.to(net.used.weight.dtype))
            x = x + net.hidden_in(hidden) * there
        return x.to(net.used.weight.dtype)

    def _block(self, n: int, x: Tensor) -> Tensor:
        """One step of a GRU."""
        gru, h = self._predictor.blocks[n], self._recurrent[n]
        assert isinstance(gru, nn.GRU)
        weight_own, weight_past, bias_own, bias_past = gru.all_weights[0]
        own = F.linear(x, weight_own, bias_own).float()
        past = F.linear(h.to(x.dtype), weight_past, bias_past).float()
        reset, update, new = own.chunk(3)
        reset_past, update_past, new_past = past.chunk(3)
        update = (update + update_past).sigmoid()
        new = (new + (reset + reset_past).sigmoid() * new_past).tanh()
        h.copy_((1 - update) * new + update * h)
        return h.to(x.dtype)
