"""Mixtral: grouped-query attention, then softmax-routed experts with renormalised weights: the
layer of `Decoder`."""

from __future__ import annotations

from seqmoe_cli.models.decoder import Decoder

DECODER = Decoder
