"""A Llama decoder in plain torch, dense or with routed experts: the teacher and the student.

Experts are computed as masks over the whole feed-forward layer: neuron n of a token is multiplied
by the sum of the routing weights of the chosen experts that hold n. It costs as much as the dense
layer, whatever the number of experts, and equals the sum of the experts that `build.py` cuts out.

Letters in shapes: B sequences, T tokens, L layers, H hidden, N neurons, E experts, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    theta: float

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """Read the sizes from a Llama's config.json."""
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            eps=config["rms_norm_eps"],
            theta=config["rope_theta"],
        )


class Layer(NamedTuple):
    """Weights of one layer: linear ones [out, in] in the compute dtype, norms [H] in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    attention_norm: Tensor
    ffn_norm: Tensor


class Experts(NamedTuple):
    """Routing of one layer: `router` [E, H]; `scale` [E, N], zero for neurons an expert lacks."""

    router: Tensor
    scale: Tensor


@dataclass
class Decoder:
    """All weights of a model. `embedding` [V, H] is also the output head."""

    shape: Shape
    embedding: Tensor
    layers: list[Layer]
    final_norm: Tensor
    experts: list[Experts] | None = None
    top_k: int = 0

    def routing(self, layer: int) -> Experts | None:
        """The experts of a layer; None in a dense model."""
        return None if self.experts is None else self.experts[layer]


def dense_decoder(
    config: dict[str, Any], tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Decoder:
    """The dense model of Hugging Face tensors, on a device."""

    def get(name: str, kind: torch.dtype) -> Tensor:
        return tensors[f"model.{name}.weight"].to(device, kind)

    shape = Shape.of(config)
    layers = [
        Layer(
            **{key: get(f"layers.{i}.{name}", dtype) for key, name in LINEARS.items()},
            **{key: get(f"layers.{i}.{name}", torch.float32) for key, name in NORMS.items()},
        )
        for i in range(shape.num_layers)
    ]
    return Decoder(shape, get("embed_tokens", dtype), layers, get("norm", torch.float32))


def rotary_table(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position: float32 [length, D] each."""
    half = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
    angles = torch.arange(length, device=device)[:, None] * shape.theta ** (-half / shape.head_dim)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys [..., T, D] to their positions."""
    low, high = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)


def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMS norm of the float32 residual stream, handed on in the compute dtype."""
    return F.rms_norm(x, weight.shape, weight, eps).to(dtype)


def heads(x: Tensor, layer: Layer, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, heads, T, D], keys and values [B, kv_heads, T, D] of normed input [B, T, H]."""

    def split(weight: Tensor) -> Tensor:
        return F.linear(x, weight).view(*x.shape[:2], -1, shape.head_dim).transpose(1, 2)

    return split(layer.q), split(layer.k), split(layer.v)


def route(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Routing weights of tokens [..., H]: dense [..., E], `top_k` of them not zero and adding up
    to 1; and the softmax they come from. Both float32."""
    probabilities = F.linear(x.float(), router.float()).softmax(dim=-1)
    chosen, ids = probabilities.topk(top_k, dim=-1)
    chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(-1, ids, chosen), probabilities


def balance_loss(weights: Tensor, probabilities: Tensor, top_k: int) -> Tensor:
    """1 when all experts are chosen equally often, more when they are not (Switch Transformer)."""
    share = (weights > 0).float().flatten(0, -2).mean(dim=0) / top_k
    return share.numel() * (share * probabilities.flatten(0, -2).mean(dim=0)).sum()


def ffn(x: Tensor, layer: Layer, experts: Experts | None, top_k: int) -> tuple[Tensor, Tensor]:
    """Feed-forward output [..., H] of normed input, and the balance loss (0 in a dense layer)."""
    activation = F.silu(F.linear(x, layer.gate)) * F.linear(x, layer.up)
    if experts is None:
        return F.linear(activation, layer.down), x.new_zeros((), dtype=torch.float32)
    weights, probabilities = route(x, experts.router, top_k)
    activation = activation * (weights.to(x.dtype) @ experts.scale)
    return F.linear(activation, layer.down), balance_loss(weights, probabilities, top_k)


def rotated_heads(
    x: Tensor, layer: Layer, shape: Shape, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned to their positions, and values of the residual stream."""
    q, k, v = heads(norm(x, layer.attention_norm, shape.eps, layer.q.dtype), layer, shape)
    return rotate(q, *rotary), rotate(k, *rotary), v


def add_heads(x: Tensor, mixed: Tensor, layer: Layer) -> Tensor:
    """Add what the heads found, [B, heads, T, D], to the residual stream."""
    return x + F.linear(mixed.transpose(1, 2).flatten(2), layer.o)


def attend(x: Tensor, layer: Layer, shape: Shape, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Add causal attention to the residual stream of whole sequences: float32 [B, T, H]."""
    q, k, v = rotated_heads(x, layer, shape, rotary)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return add_heads(x, mixed, layer)


def add_ffn(
    x: Tensor, layer: Layer, experts: Experts | None, shape: Shape, top_k: int
) -> tuple[Tensor, Tensor]:
    """Add the feed-forward output to the residual stream; also the balance loss."""
    normed = norm(x, layer.ffn_norm, shape.eps, layer.q.dtype)
    out, balance = ffn(normed, layer, experts, top_k)
    return x + out, balance


def layer_forward(
    x: Tensor,
    layer: Layer,
    experts: Experts | None,
    shape: Shape,
    top_k: int,
    rotary: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """One layer over whole sequences: the new residual stream and the balance loss."""
    return add_ffn(attend(x, layer, shape, rotary), layer, experts, shape, top_k)


def hidden_states(
    model: Decoder, rows: Tensor, visit: Callable[[int, Tensor], None] | None = None
) -> Tensor:
    """Final normed hidden states [B, T, H] of rows of token ids.

    `visit` is shown each layer's number and its normed feed-forward input [B, T, H].
    """
    shape, dtype = model.shape, model.embedding.dtype
    rotary = rotary_table(shape, rows.shape[1], rows.device)
    x = model.embedding[rows].float()
    for i, layer in enumerate(model.layers):
        x = attend(x, layer, shape, rotary)
        normed = norm(x, layer.ffn_norm, shape.eps, dtype)
        if visit is not None:
            visit(i, normed)
        x = x + ffn(normed, layer, model.routing(i), model.top_k)[0]
    return norm(x, model.final_norm, shape.eps, dtype)


def finish_layer(
    x: Tensor, mixed: Tensor, layer: Layer, experts: Experts | None, shape: Shape, top_k: int
) -> Tensor:
    """What follows attention in a layer, for sampling."""
    return add_ffn(add_heads(x, mixed, layer), layer, experts, shape, top_k)[0]


class Stepper:
    """One token at a time for a batch of sequences; `compiled` costs seconds and pays on a GPU."""

    def __init__(self, model: Decoder, rows: int, length: int, compiled: bool) -> None:
        shape, device = model.shape, model.embedding.device
        size = (shape.num_layers, rows, shape.num_kv_heads, length, shape.head_dim)
        self._model = model
        self._keys = torch.empty(size, device=device, dtype=model.embedding.dtype)
        self._values = torch.empty_like(self._keys)
        self._rotary = rotary_table(shape, length, device)
        self._begin = compile_once(rotated_heads, True) if compiled else rotated_heads
        self._finish = compile_once(finish_layer, True) if compiled else finish_layer

    @torch.no_grad()
    def __call__(self, tokens: Tensor, position: int) -> Tensor:
        """Token ids [B] at a position -> logits [B, V] of the next ones."""
        model, shape = self._model, self._model.shape
        x = model.embedding[tokens][:, None].float()
        cos, sin = (table[position : position + 1] for table in self._rotary)
        past = slice(0, position + 1)
        for i, layer in enumerate(model.layers):
            q, k, v = self._begin(x, layer, shape, (cos, sin))
            keys, values = self._keys[i], self._values[i]
            keys[:, :, position], values[:, :, position] = k[:, :, 0], v[:, :, 0]
            mixed = F.scaled_dot_product_attention(
                q, keys[:, :, past], values[:, :, past], enable_gqa=True
            )
            x = self._finish(x, mixed, layer, model.routing(i), shape, model.top_k)
        last = norm(x[:, 0], model.final_norm, shape.eps, model.embedding.dtype)
        return F.linear(last, model.embedding)


@cache
def compile_once(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """The function compiled, for fixed shapes or any; the same object each time."""
    return torch.compile(function, dynamic=dynamic)
