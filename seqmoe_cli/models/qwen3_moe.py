"""Qwen3-MoE (Qwen3-30B-A3B and its relatives): the layer of Mixtral. What differs is in the
checkpoint: a norm of every query and key head, and whether the experts' weights are renormalised
is a setting."""

from __future__ import annotations

from seqmoe_cli.models.decoder import Decoder

DECODER = Decoder
