"""Mixtral: grouped-query attention, then softmax-routed experts with renormalised weights."""

from __future__ import annotations

import torch

from seqmoe_cli.models.decoder import Attention, Decoder, Experts
from seqmoe_kernels import Matrix


class Mixtral(Decoder):
    def layer(
        self,
        n: int,
        x: torch.Tensor,
        attention: Attention,
        experts: Experts,
        ahead: Matrix | None = None,
    ) -> torch.Tensor:
        x = self.attend(n, x, attention)
        return self.mix_experts(n, x, experts, ahead)


DECODER = Mixtral
