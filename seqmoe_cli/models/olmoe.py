"""OLMoE: queries and keys normed over their full width, softmax-routed experts whose weights
are left as the softmax gives them unless the checkpoint asks for renormalisation."""

from __future__ import annotations

import torch

from seqmoe_cli.models.decoder import Attention, Decoder, Experts


class Olmoe(Decoder):
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

        h, logits = self.normed_projection(x, between, f"{at}.mlp.gate")  # logits [T, num_experts]
        return experts(n, x, h, logits)


DECODER = Olmoe
