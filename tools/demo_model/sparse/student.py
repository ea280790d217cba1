"""The trainable part of the sparse model: everything that is laid over the dense weights.

Low-rank changes of all linear layers, the norms, the routers, and for every expert the neurons of
the dense layer that it holds, each with a factor. Two experts may hold the same neuron: what many
tokens need is in many experts.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_model.sparse.decoder import (
    LINEARS,
    NORMS,
    Decoder,
    Experts,
    Layer,
    Shape,
)
from tools.demo_model.sparse.delta import is_healed, read_delta

RANKS = {"q": 32, "k": 32, "v": 32, "o": 32, "gate": 128, "up": 128, "down": 128}


class Student:
    """The sparse model while it is trained.

    `base`: frozen dense weights float32 [L, out, in] by the keys of LINEARS. `parameters`:
    float32; `<key>.a` [L, rank, in], `<key>.b` [L, out, rank], the norms [L, H], `final_norm` [H],
    `router` [L, E, H], `scale` [L, E, N]. `support` bool [L, E, N]: which neurons experts hold.
    """

    def __init__(
        self,
        shape: Shape,
        embedding: Tensor,
        base: dict[str, Tensor],
        parameters: dict[str, Tensor],
        support: Tensor,
        top_k: int,
    ) -> None:
        self.shape, self.embedding, self.base = shape, embedding, base
        self.parameters, self.support, self.top_k = parameters, support, top_k

    def decoder(self) -> Decoder:
        """The model in the embedding's dtype; gradients flow from it to `parameters`."""
        p, dtype = self.parameters, self.embedding.dtype
        merged = {
            key: torch.baddbmm(base, p[f"{key}.b"], p[f"{key}.a"]).to(dtype).unbind()
            for key, base in self.base.items()
        }
        norms = {key: p[key].unbind() for key in NORMS}
        parts = {**merged, **norms}
        layers = [
            Layer(**{key: part[i] for key, part in parts.items()})
            for i in range(self.shape.num_layers)
        ]
        scales = (p["scale"] * self.support).to(dtype).unbind()
        experts = [Experts(*pair) for pair in zip(p["router"].unbind(), scales, strict=True)]
        return Decoder(self.shape, self.embedding, layers, p["final_norm"], experts, self.top_k)


def stacked_base(
    tensors: dict[str, Tensor], num_layers: int, device: torch.device
) -> dict[str, Tensor]:
    """The dense linear weights float32 [L, out, in] by the keys of LINEARS."""
    return {
        key: torch.stack(
            [tensors[f"model.layers.{i}.{name}.weight"] for i in range(num_layers)]
        ).to(device)
        for key, name in LINEARS.items()
    }


def new_student(dense: Decoder, base: dict[str, Tensor], router: Tensor, top_k: int) -> Student:
    """A student that computes what `dense` does: every expert holds every neuron, with factor 1.

    `router`: [L, E, H].
    """
    parameters: dict[str, Tensor] = {}
    for key, weight in base.items():
        layers, out, into = weight.shape
        a = torch.randn(layers, RANKS[key], into, device=weight.device) / math.sqrt(into)
        parameters[f"{key}.a"] = a
        parameters[f"{key}.b"] = weight.new_zeros(layers, out, RANKS[key])
    for key in NORMS:
        parameters[key] = torch.stack([getattr(layer, key) for layer in dense.layers])
    parameters["final_norm"] = dense.final_norm.clone()
    parameters["router"] = router.clone()
    scale = torch.ones(*router.shape[:2], dense.shape.ffn, device=router.device)
    parameters["scale"] = scale
    for tensor in parameters.values():
        tensor.requires_grad_()
    support = torch.ones_like(scale, dtype=torch.bool)
    return Student(dense.shape, dense.embedding, base, parameters, support, top_k)


def delta_student(
    dense: Decoder, base: dict[str, Tensor], delta: dict[str, Tensor], top_k: int
) -> Student:
    """The student that a delta describes; nothing of it is trainable."""
    parameters, support = read_delta(delta, dense.shape.ffn)
    device = dense.embedding.device
    moved = {name: tensor.to(device) for name, tensor in parameters.items()}
    return Student(dense.shape, dense.embedding, base, moved, support.to(device), top_k)


def healing_student(
    dense: Decoder, base: dict[str, Tensor], delta: dict[str, Tensor], top_k: int, rank: int
) -> Student:
    """The student that a delta describes, what the healing changes of it being trainable.

    The low-rank changes of its attention grow to `rank`, without changing what it computes yet.
    """
    student = delta_student(dense, base, delta, top_k)
    p = student.parameters
    for name in [name for name in p if name.endswith(".a") and is_healed(name)]:
        a, b = p[name], p[name[0] + ".b"]
        layers, old, into = a.shape
        more = torch.randn(layers, rank - old, into, device=a.device) / math.sqrt(into)
        p[name], p[name[0] + ".b"] = torch.cat([a, more], dim=1), F.pad(b, (0, rank - old))
    for name, tensor in p.items():
        tensor.requires_grad_(is_healed(name))
    return student
