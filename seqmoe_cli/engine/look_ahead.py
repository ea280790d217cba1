"""Look-ahead: the routers of the next layers, applied to a layer's own state.

A router reads its layer's norm of the residual stream. Here the state is normed once, as the layer
does it; what the gains of the other norms differ by is in the weights. So one kernel gives the
logits of a layer's router and of the next ones.
"""

from __future__ import annotations

import torch

from seqmoe_cli.models.decoder import Decoder
from seqmoe_kernels import Matrix
from seqmoe_weights.config import ModelConfig


def look_ahead_routers(decoder: Decoder, distance: int) -> list[Matrix | None]:
    """For each layer what `Decoder.layer` takes as `ahead`: the routers of the d <= `distance`
    layers behind it, [d * num_experts, H]; None for the last layer. `look_ahead_bytes` are made."""
    last = decoder.config.num_hidden_layers - 1
    ranges = [range(n + 1, min(n + distance, last) + 1) for n in range(last)]
    return [*(_stacked(decoder, n, later) for n, later in enumerate(ranges)), None]


def _stacked(decoder: Decoder, layer: int, later: range) -> Matrix:
    def gain(n: int) -> torch.Tensor:
        return decoder.weight("mlp_norm", n).float()

    own, router = gain(layer), decoder.weight("router", layer)
    stack = [
        decoder.weight("router", n).float() * torch.where(own == 0, 0, gain(n) / own) for n in later
    ]
    return Matrix.of(torch.cat(stack).to(router.dtype).contiguous())


def look_ahead_bytes(config: ModelConfig, distance: int, dtype: torch.dtype) -> int:
    """What `look_ahead_routers` allocates."""
    layers = config.num_hidden_layers
    routers = sum(min(distance, layers - 1 - n) for n in range(layers))
    return routers * config.num_experts * config.hidden_size * dtype.itemsize
