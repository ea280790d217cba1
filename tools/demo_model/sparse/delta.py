"""The delta: what is shipped of the sparse model, rounded, and how it goes onto the dense weights.

The first training writes all of it. The second one, the healing, changes a part and writes tensors
that take the place of those of the same name: `delta | healing` is the delta of the healed model.

Low-rank factors are int8 with one float32 step per row (of `a`: per rank, of `b`: per output);
norms, routers and the factors of kept neurons are bfloat16; kept neurons are int16 indices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.demo_model.sparse.decoder import LINEARS, NORMS

UNHEALED = ("gate", "up", "down", "neurons")


def is_healed(name: str) -> bool:
    """Whether the healing changes a parameter of a student, or a tensor of a delta."""
    return name.partition(".")[0] not in UNHEALED


def round_delta(parameters: dict[str, Tensor], support: Tensor) -> dict[str, Tensor]:
    """The tensors to ship of a student's `parameters` and `support`, on the CPU.

    Every expert must hold equally many neurons.
    """
    delta: dict[str, Tensor] = {}
    for key in LINEARS:
        for part in ("a", "b"):
            name = f"{key}.{part}"
            delta[name], delta[f"{name}.step"] = _to_int8(parameters[name].detach())
    for name in (*NORMS, "final_norm", "router"):
        delta[name] = parameters[name].detach().bfloat16()
    width = int(support[0, 0].sum())
    if not bool((support.sum(dim=-1) == width).all()):
        raise ValueError("the experts hold different numbers of neurons")
    neurons = support.int().topk(width, dim=-1).indices.sort(dim=-1).values
    delta["neurons"] = neurons.short()
    delta["factors"] = parameters["scale"].detach().gather(-1, neurons).bfloat16()
    return {name: tensor.cpu().contiguous() for name, tensor in delta.items()}


def read_delta(delta: dict[str, Tensor], num_neurons: int) -> tuple[dict[str, Tensor], Tensor]:
    """`parameters` and `support` of a student out of shipped tensors, float32 and bool."""
    parameters: dict[str, Tensor] = {}
    for key in LINEARS:
        for part in ("a", "b"):
            name = f"{key}.{part}"
            parameters[name] = delta[name].float() * delta[f"{name}.step"]
    for name in (*NORMS, "final_norm", "router"):
        parameters[name] = delta[name].float()
    neurons = delta["neurons"].long()
    empty = torch.zeros(*neurons.shape[:2], num_neurons)
    parameters["scale"] = empty.scatter(-1, neurons, delta["factors"].float())
    return parameters, empty.bool().scatter(-1, neurons, True)


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    step = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / step).round().to(torch.int8), step
