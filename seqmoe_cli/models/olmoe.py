"""OLMoE: queries and keys normed over their full width, softmax-routed experts whose weights
are left as the softmax gives them unless the checkpoint asks for renormalisation."""

from __future__ import annotations

import torch

from seqmoe_cli.models.decoder import Attention, Decoder, Experts
from seqmoe_kernels import route


class Olmoe(Decoder):
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
        q = self.norm(f"{at}.self_attn.q_norm", self.linear(f"{at}.self_attn.q_proj", h))
        k = self.norm(f"{at}.self_attn.k_norm", self.linear(f"{at}.self_attn.k_proj", h))
        v = self.heads(self.linear(f"{at}.self_attn.v_proj", h))  # [T, m, D]
        q = self.rotary(self.heads(q), positions)
        k = self.rotary(self.heads(k), positions)
        x = x + self.linear(f"{at}.self_attn.o_proj", attention(n, q, k, v))

        h = self.norm(f"{at}.post_attention_layernorm", x)
        logits = self.linear(f"{at}.mlp.gate", h)  # [T, num_experts]
        ids, weights = route(logits, config.num_experts_per_tok, config.norm_topk_prob)
        return x + experts(n, h, ids, weights)


DECODER = Olmoe
