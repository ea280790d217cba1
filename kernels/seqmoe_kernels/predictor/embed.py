"""The input of a predictor: rows of a table, summed, and what a token adds."""

from __future__ import annotations

from typing import NamedTuple

import torch
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


def sum_rows_reference(
    table: torch.Tensor,
    used: torch.Tensor,
    token: torch.Tensor,
    token_input: TokenInput | None,
) -> torch.Tensor:
    there = used < len(table)
    rows = table[used.clamp(max=len(table) - 1).long()].float()
    x = (rows * there[:, None]).sum(0)
    if token_input is not None:
        x = x + token_input.matrix.float() @ token_input.vectors[token[0]].float()
    return x


@triton.jit
def _row_sum_kernel(
    table,
    used,
    token,
    vectors,
    token_matrix,
    out,
    num_rows,
    D: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_R: tl.constexpr,
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
) -> torch.Tensor:
    """The sum of the rows `used` (int32 [U]) of `table` [N, D], plus the vector of `token` (int64
    [1]) by its matrix if there is one: f32 [D]. Rows that are N or more are none."""
    check_kernel_device(table)
    check("table", table, FLOATS, (-1, -1), table.device)
    check("used", used, torch.int32, (-1,), table.device)
    num_rows, width = table.shape
    vectors, token_matrix, rank = table, table, 0
    if token_input is not None:
        vectors, token_matrix = token_input
        rank = vectors.shape[1]
        check("token", token, torch.int64, (1,), table.device)
        check("vectors", vectors, table.dtype, (-1, rank), table.device)
        check("matrix", token_matrix, table.dtype, (width, rank), table.device)
    out = torch.empty(width, dtype=torch.float32, device=table.device)
    block_used = triton.next_power_of_2(len(used))
    _row_sum_kernel[(triton.cdiv(width, _COLUMNS),)](
        table=table,
        used=used,
        token=token,
        vectors=vectors,
        token_matrix=token_matrix,
        out=out,
        num_rows=num_rows,
        D=width,
        U=len(used),
        R=rank,
        COLUMNS=_COLUMNS,
        BLOCK_U=block_used,
        BLOCK_R=triton.next_power_of_2(max(rank, 1)),
        num_warps=min(max(block_used // 128, 1), 8),
        enable_fp_fusion=True,
        **pdl_options(table.device),
    )
    return out
