"""Mixtral: grouped-query attention, then softmax-routed experts with renormalised weights."""

from __future__ import annotations

import torch

from seqmoe_cli.models.decoder import Attention, Decoder, Experts


class Mixtral(Decoder):
    router = "block_sparse_moe.gate"

    def layer(
        self, n: int, x: torch.Tensor, attention: Attention, experts: Experts
    ) -> torch.Tensor:
        at = f"model.layers.{n}"
        attn, before, between = (
            f"{at}.{name}" for name in ("self_attn", "input_layernorm", "post_attention_layernorm")
        )
        q, k, v = self.projections(x, before, f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")
        mixed = attention(n, q, k, v, self.rotation())
        x = self.add_projection(x, f"{attn}.o_proj", mixed)

        h, logits = self.normed_projection(x, between, f"{at}.{self.router}")
        return experts(n, x, h, logits)


DECODER = Mixtral
