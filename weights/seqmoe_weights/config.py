"""ModelConfig: what the engine needs to know of a checkpoint, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of one decoder, under the names that Hugging Face's config.json gives them.

    Mixtral's `num_local_experts` and `intermediate_size` are read into `num_experts` and
    `moe_intermediate_size`. `family` is config.json's `model_type` and names the file in
    `families/` here and in `seqmoe_cli/models/`.
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

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """Read a parsed config.json; see `families/`.

        Raises `CheckpointError` for a missing or ill-typed field and `UnsupportedError`, both
        naming the field, for a value that is not implemented.
        """
        from seqmoe_weights.families import family_of

        return family_of(config).read_config(config)
