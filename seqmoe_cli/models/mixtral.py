"""Mixtral: grouped-query attention, then softmax-routed experts with renormalised weights."""

from __future__ import annotations

import torch

from seqmoe_cli.models.decoder import Attention, Decoder, Experts
from seqmoe_kernels import route


class Mixtral(Decoder):
    def layer(
        self,
        n: int,
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        experts: Experts,
    ) -> torch.Tensor:
        config, at = self.config, f"model.layers.{n}"
        h = self.norm(f"{at}.input_layernorm", x)
        q = self.rotary(self.heads(self.linear(f"{at}.self_attn.q_proj", h)), positions)
        k = self.rotary(self.heads(self.linear(f"{at}.self_attn.k_proj", h)), positions)
        v = self.heads(self.linear(f"{at}.self_attn.v_proj", h))  # [T, m, D]
        x = x + self.linear(f"{at}.self_attn.o_proj", attention(n, q, k, v))

        h = self.norm(f"{at}.post_attention_layernorm", x)
        logits = self.linear(f"{at}.block_sparse_moe.gate", h)  # [T, num_experts]
        ids, weights = route(logits, config.num_experts_per_tok, config.norm_topk_prob)
        return x + experts(n, h, ids, weights)


DECODER = Mixtral
