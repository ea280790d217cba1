"""Decoders, one file per family, named after the checkpoint's `model_type`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import torch

from seqmoe_cli.models.decoder import Decoder
from seqmoe_weights.config import ModelConfig
from seqmoe_weights.errors import UnsupportedError

_registered: dict[str, type[Decoder]] = {}


def register(family: str, decoder: type[Decoder]) -> None:
    """Make the decoder of a family known that is no file of this folder."""
    _registered[family] = decoder


def build_decoder(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Decoder:
    """The decoder of `config.family` over its resident weights. Raises `UnsupportedError` when
    there is none."""
    decoder = _registered.get(config.family)
    if decoder is None:
        try:
            decoder = importlib.import_module(f"seqmoe_cli.models.{config.family}").DECODER
        except ModuleNotFoundError:
            raise UnsupportedError(f"no decoder for model_type {config.family!r}") from None
    return decoder(config, weights)
