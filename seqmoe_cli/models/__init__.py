"""Decoders, one file per family, named after the checkpoint's `model_type`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import torch

from seqmoe_cli.models.decoder import Decoder
from seqmoe_weights.config import ModelConfig
from seqmoe_weights.errors import UnsupportedError


def build_decoder(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Decoder:
    """The decoder of `config.family` over its resident weights; a new family is a new file here."""
    try:
        module = importlib.import_module(f"seqmoe_cli.models.{config.family}")
    except ModuleNotFoundError:
        raise UnsupportedError(f"no decoder for model_type {config.family!r}") from None
    decoder: Decoder = module.DECODER(config, weights)
    return decoder
