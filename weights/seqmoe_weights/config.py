"""ModelConfig: what the engine needs to know of a checkpoint, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of one decoder, under the names that Hugging Face's config.json gives them.

    Mixtral's `num_local_experts` and `intermediate_size` are read into `num_experts` and
    `moe_intermediate_size`. `family` is config.json's `model_type` and names the file in
    `families/`.
    """

    family: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    norm_topk_prob: bool
    tie_word_embeddings: bool
    dense_format: str
    """How linear layers are stored: `BF16`, `F16`, `F32` or `FP8` (in blocks of 128x128)."""

    @property
    def num_routed_experts(self) -> int:
        """Routed experts of the whole model: layers times experts per layer."""
        return self.num_hidden_layers * self.num_experts

    @property
    def query_width(self) -> int:
        """All query heads of a token."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """All key heads of a token, or all value heads."""
        return self.num_key_value_heads * self.head_dim
