"""Qwen3-MoE (Qwen3-30B-A3B and its relatives): grouped-query attention with a norm on every
query and key head, then softmax-routed experts with renormalised weights."""

from __future__ import annotations

import torch

from seqmoe_cli.models.decoder import Attention, Decoder, Experts


class Qwen3Moe(Decoder):
    def layer(
        self, n: int, x: torch.Tensor, attention: Attention, experts: Experts
    ) -> torch.Tensor:
        at = f"model.layers.{n}"
        attn, before, between = (
            f"{at}.{name}" for name in ("self_attn", "input_layernorm", "post_attention_layernorm")
        )
        q, k, v = self.projections(x, before, f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")
        mixed = attention(n, q, k, v, self.rotation(f"{attn}.q_norm", f"{attn}.k_norm"))
        x = self.add_projection(x, f"{attn}.o_proj", mixed)

        h, logits = self.normed_projection(
            x, between, f"{at}.{self.router}"
        )  # logits [T, num_experts]
        return experts(n, x, h, logits)


DECODER = Qwen3Moe
