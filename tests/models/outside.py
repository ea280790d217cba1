"""A way to store weights and a family, as somebody outside of seqmoe would add them, by the steps
that docs/architecture.md gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from seqmoe_cli.models.decoder import Attention, Decoder, Experts
from seqmoe_kernels import Matrix
from seqmoe_kernels.formats import Format, Part, TileFunctions
from seqmoe_weights.config import ModelConfig
from seqmoe_weights.families import Family, Weight
from seqmoe_weights.families._common import read_decoder
from seqmoe_weights.fields import Fields


@triton.jit
def _scales(others, first, row, begin, inside, K: tl.constexpr, CACHE: tl.constexpr):
    """f32 [W, R, 8]: the same for all slices of a row. What rows past the end get is not used."""
    at = tl.zeros_like(begin)[:, None, :] + row[None, :, None]
    if others[0].type.is_block():  # a pointer for each slice
        return tl.load(others[0][:, None, :] + at, mask=inside[:, None, :], other=0.0)
    else:
        return tl.load(others[0] + at, mask=inside[:, None, :], other=0.0)


@triton.jit
def _joined(even, odd, is_odd):
    return tl.where(is_odd, odd, even)


@triton.jit
def _weights(rows, scales, OPERAND: tl.constexpr):
    return rows.to(OPERAND)


@triton.jit
def _vector(rows, OPERAND: tl.constexpr, STORED: tl.constexpr):
    return rows.to(OPERAND), tl.full((rows.shape[0], rows.shape[1]), 1.0, tl.float32)


@triton.jit
def _factor(by, scales):
    return by[:, None, :] * scales


@triton.jit
def _dense(weight, others, row, column, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, column = row + tl.arange(0, ROWS), column + tl.arange(0, COLS)
    scale = tl.load(others[0] + row, mask=row < rows, other=0.0)
    mask = (row < rows)[:, None] & (column < cols)[None, :]
    code = tl.load(weight + row[:, None] * cols + column[None, :], mask=mask, other=0)
    return code.to(tl.float32) * scale[:, None]


class IntRows(Format):
    """int8 with one F32 scale for each row."""

    name = "INT8_ROWS"
    tiles = TileFunctions(tl.constexpr(8), _scales, _joined, _weights, _vector, _factor, _dense)

    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        return Part("", "I8", (rows, cols)), Part("_scale", "F32", (rows,))

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scale = parts
        return (codes.float() * scale[:, None]).to(dtype)

    def encode(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = weight.float().abs().amax(1) / 127
        return (weight.float() / scale[:, None]).round().to(torch.int8), scale

    def operand(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


def _read_config(fields: Fields) -> ModelConfig:
    return read_decoder(
        fields,
        experts="n_experts",
        inter="expert_size",
        default_kv_heads=True,
        norm_topk_prob=True,
    )


def _of_layer(name: str, *shape: str) -> Weight:
    return Weight(f"block.{{layer}}.{name}", shape)


FAMILY = Family(
    "experts_first",
    _read_config,
    {
        "embedding": Weight("words", ("vocab_size", "hidden_size")),
        "final_norm": Weight("last_norm", ("hidden_size",)),
        "head": Weight("out", ("vocab_size", "hidden_size")),
        "attention_norm": _of_layer("norm_a", "hidden_size"),
        "q": _of_layer("wq", "query_width", "hidden_size"),
        "k": _of_layer("wk", "key_width", "hidden_size"),
        "v": _of_layer("wv", "key_width", "hidden_size"),
        "o": _of_layer("wo", "hidden_size", "query_width"),
        "mlp_norm": _of_layer("norm_b", "hidden_size"),
        "router": _of_layer("choose", "num_experts", "hidden_size"),
        "gate": _of_layer("expert.{expert}.a", "moe_intermediate_size", "hidden_size"),
        "up": _of_layer("expert.{expert}.b", "moe_intermediate_size", "hidden_size"),
        "down": _of_layer("expert.{expert}.c", "hidden_size", "moe_intermediate_size"),
    },
)


class ExpertsFirst(Decoder):
    """The experts come first, and attention after them."""

    def layer(
        self,
        n: int,
        x: torch.Tensor,
        attention: Attention,
        experts: Experts,
        ahead: Matrix | None = None,
    ) -> torch.Tensor:
        x = self.mix_experts(n, x, experts, ahead)
        return self.attend(n, x, attention)
