"""Decoders, by the checkpoint's `model_type`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from seqmoe_cli.models.decoder import Decoder
from seqmoe_weights.config import ModelConfig
from seqmoe_weights.errors import UnsupportedError

# What differs between these is in the checkpoint: norms of queries and keys, and whether the
# experts' weights are renormalised.
_decoders: dict[str, type[Decoder]] = dict.fromkeys(("mixtral", "olmoe", "qwen3_moe"), Decoder)


def register(family: str, decoder: type[Decoder]) -> None:
    """Make the decoder of another family known."""
    _decoders[family] = decoder


def build_decoder(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Decoder:
    """The decoder of `config.family` over its resident weights. Raises `UnsupportedError` when
    there is none."""
    if config.family not in _decoders:
        raise UnsupportedError(f"no decoder for model_type {config.family!r}")
    return _decoders[config.family](config, weights)
