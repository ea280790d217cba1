"""The input of a predictor: rows of a table, summed, and what a token and a hidden state add."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check, check_kernel_device
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.common.verb import verb

_COLUMNS = 16  # of a program; 32 bytes of bfloat16 are what memory hands out


class TokenInput(NamedTuple):
    """`vectors` [V, R], one for each token id, and the `matrix` [D, R] that takes them to D."""

    vectors: torch.Tensor
    matrix: torch.Tensor


class HiddenInput(NamedTuple):
    """A layer norm, `gain` and `bias` [H] and `eps`, and the `matrix` [D, H] behind it."""

    gain: torch.Tensor
    bias: torch.Tensor
    eps: float
    matrix: torch.Tensor


def sum_rows_reference(
    table: torch.Tensor,
    used: torch.Tensor,
    token: torch.Tensor,
    token_input: TokenInput | None,
    hidden: torch.Tensor,
    hidden_input: HiddenInput | None,
) -> torch.Tensor:
    there = used < len(table)
    rows = table[used.clamp(max=len(table) - 1).long()].float()
    x = (rows * there[:, None]).sum(0)
    if token_input is not None:
        x = x + token_input.matrix.float() @ token_input.vectors[token[0]].float()
    if hidden_input is not None:
        gain, bias, eps, matrix = hidden_input
        normal = F.layer_norm(hidden, hidden.shape, gain.float(), bias.float(), eps)
        x = x + matrix.float() @ normal * there[0]
    return x


@triton.jit
def _row_sum_kernel(
    table,
    used,
    token,
    vectors,
    token_matrix,
    hidden,
    gain,
    bias,
    eps,
    hidden_matrix,
    out,
    num_rows,
    D: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    let_next_start(PDL)  # late: those that follow read ahead what kernels before this one write
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < D
    i = tl.arange(0, BLOCK_U)
    row = tl.load(used + i, mask=i < U, other=num_rows).to(tl.int64)
    at = row[:, None] * D + column[None, :]
    rows = tl.load(table + at, mask=(row < num_rows)[:, None] & inside[None, :], other=0)
    total = tl.sum(rows.to(tl.float32), 0)
    if R > 0:
        r = tl.arange(0, BLOCK_R)
        vector = tl.load(vectors + tl.load(token) * R + r, mask=r < R, other=0).to(tl.float32)
        total += _product(token_matrix, vector, column, inside, R, BLOCK_R)
    if H > 0:
        h = tl.arange(0, BLOCK_H)
        value = tl.load(hidden + h, mask=h < H, other=0)
        centred = tl.where(h < H, value - tl.sum(value) / H, 0.0)
        normal = centred * tl.rsqrt(tl.sum(centred * centred) / H + eps)
        normal = normal * tl.load(gain + h, mask=h < H, other=0).to(tl.float32)
        normal += tl.load(bias + h, mask=h < H, other=0).to(tl.float32)
        product = _product(hidden_matrix, normal, column, inside, H, BLOCK_H)
        total += tl.where(tl.load(used) < num_rows, product, 0.0)
    tl.store(out + column, total, mask=inside)


@triton.jit
def _product(matrix, vector, row, inside, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows of a matrix [.., K], K being small, times a vector that is zero past K: f32 [rows]."""
    k = tl.arange(0, BLOCK_K)
    mask = inside[:, None] & (k < K)[None, :]
    tile = tl.load(matrix + row.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0)
    return tl.sum(tile.to(tl.float32) * vector[None, :], 1)


@verb(sum_rows_reference)
def sum_rows(
    table: torch.Tensor,
    used: torch.Tensor,
    token: torch.Tensor,
    token_input: TokenInput | None,
    hidden: torch.Tensor,
    hidden_input: HiddenInput | None,
) -> torch.Tensor:
    """The sum of the rows `used` (int32 [U]) of `table` [N, D], plus the vector of `token` (int64
    [1]) and `hidden` (f32 [H]), each by its matrix if there is one: f32 [D].

    Rows that are N or more are none, and if the first is none, nor is there a hidden state.
    """
    check_kernel_device(table)
    check("table", table, FLOATS, (-1, -1), table.device)
    check("used", used, torch.int32, (-1,), table.device)
    num_rows, width = table.shape
    vectors = token_matrix = gain = bias = hidden_matrix = table
    rank, hidden_size, eps = 0, 0, 0.0
    if token_input is not None:
        vectors, token_matrix = token_input
        rank = vectors.shape[1]
        check("token", token, torch.int64, (1,), table.device)
        check("vectors", vectors, table.dtype, (-1, rank), table.device)
        check("matrix", token_matrix, table.dtype, (width, rank), table.device)
    if hidden_input is not None:
        gain, bias, eps, hidden_matrix = hidden_input
        hidden_size = len(gain)
        check("hidden", hidden, torch.float32, (hidden_size,), table.device)
        check("bias", bias, table.dtype, (hidden_size,), table.device)
        check("matrix", hidden_matrix, table.dtype, (width, hidden_size), table.device)
    out = torch.empty(width, dtype=torch.float32, device=table.device)
    block_used = triton.next_power_of_2(len(used))
    _row_sum_kernel[(triton.cdiv(width, _COLUMNS),)](
        table,
        used,
        token,
        vectors,
        token_matrix,
        hidden,
        gain,
        bias,
        eps,
        hidden_matrix,
        out,
        num_rows,
        width,
        len(used),
        rank,
        hidden_size,
        _COLUMNS,
        block_used,
        triton.next_power_of_2(max(rank, 1)),
        triton.next_power_of_2(max(hidden_size, 1)),
        num_warps=min(max(block_used // 128, 1), 8),
        enable_fp_fusion=True,
        **pdl_options(table.device),
    )
    return out
