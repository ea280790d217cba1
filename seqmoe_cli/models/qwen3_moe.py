"""Qwen3-MoE (Qwen3-30B-A3B and its relatives): grouped-query attention with a norm on every
query and key head, then softmax-routed experts with renormalised weights."""

from __future__ import annotations

import torch

from seqmoe_cli.models.decoder import Attention, Decoder, Experts
from seqmoe_kernels import route


class Qwen3Moe(Decoder):
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
        q = self.heads(self.linear(f"{at}.self_attn.q_proj", h))  # [T, n, D]
        k = self.heads(self.linear(f"{at}.self_attn.k_proj", h))  # [T, m, D]
        v = self.heads(self.linear(f"{at}.self_attn.v_proj", h))
        q = self.rotary(q, positions, norm=f"{at}.self_attn.q_norm")
        k = self.rotary(k, positions, norm=f"{at}.self_attn.k_norm")
        x = x + self.linear(f"{at}.self_attn.o_proj", attention(n, q, k, v))

        h = self.norm(f"{at}.post_attention_layernorm", x)
        logits = self.linear(f"{at}.mlp.gate", h)  # [T, num_experts]
        ids, weights = route(logits, config.num_experts_per_tok, config.norm_topk_prob)
        return x + experts(n, h, ids, weights)


DECODER = Qwen3Moe
