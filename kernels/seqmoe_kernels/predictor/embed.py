"""The input of a predictor: rows of a table, summed, and what a token adds."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.common.checks import FLOATS, check
from seqmoe_kernels.common.launch import let_next_start, pdl_options, wait_for_inputs
from seqmoe_kernels.common.verb import verb

_COLUMNS = 16  # of a program; 32 bytes of bfloat16 are what memory hands out


class TokenInput(NamedTuple):
    """`vectors` [V, R], one for each token id, and the `matrix` [D, R] that takes them to D."""

    vectors: torch.Tensor
    matrix: torch.Tensor


class StepInput(NamedTuple):
    """What a predictor goes by in a step. Without a `token_input`, `token` says nothing."""

    used: torch.Tensor  # int32 [L * K], flat ids of the step that is over; N or more: none
    token: torch.Tensor  # int64 [1], the one that comes next
    token_input: TokenInput | None


def check_step_input(step: StepInput, width: int, device: torch.device) -> int:
    """`token_input` must lead to `width`. Returns its rank, 0 for none."""
    check("used", step.used, torch.int32, (-1,), device)
    if step.token_input is None:
        return 0
    vectors, matrix = step.token_input
    rank = vectors.shape[1]
    check("token", step.token, torch.int64, (1,), device)
    check("token_input.vectors", vectors, FLOATS, (-1, rank), device)
    check("token_input.matrix", matrix, FLOATS, (width, rank), device)
    return rank


def sum_rows_reference(table: torch.Tensor, step: StepInput) -> torch.Tensor:
    used, token, token_input = step
    there = used < len(table)
    rows = table[used.clamp(max=len(table) - 1).long()].float()
    x = (rows * there[:, None]).sum(0)
    if token_input is not None:
        x = x + token_input.matrix.float() @ token_input.vectors[token[0]].float()
    return x


@triton.jit
def _row_sum_kernel(
    table,
    step,
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
    row = tl.load(step.used + i, mask=i < U, other=num_rows).to(tl.int64)
    at = row[:, None] * D + column[None, :]
    rows = tl.load(table + at, mask=(row < num_rows)[:, None] & inside[None, :], other=0)
    total = tl.sum(rows.to(tl.float32), 0)
    if R > 0:
        r = tl.arange(0, BLOCK_R)
        vectors, matrix = step.token_input
        vector = tl.load(vectors + tl.load(step.token) * R + r, mask=r < R, other=0)
        at = column.to(tl.int64)[:, None] * R + r[None, :]
        tile = tl.load(matrix + at, mask=inside[:, None] & (r < R)[None, :], other=0)
        total += tl.sum(tile.to(tl.float32) * vector.to(tl.float32)[None, :], 1)
    tl.store(out + column, total, mask=inside)


@verb(sum_rows_reference)
def sum_rows(table: torch.Tensor, step: StepInput) -> torch.Tensor:
    """The sum of the rows `used` of `table` [N, D], plus the vector of the token by the matrix
    [D, R] if there is a `token_input`: f32 [D]."""
    check("table", table, FLOATS, (-1, -1), table.device)
    num_rows, width = table.shape
    rank = check_step_input(step, width, table.device)
    out = torch.empty(width, dtype=torch.float32, device=table.device)
    block_used = triton.next_power_of_2(len(step.used))
    _row_sum_kernel[(triton.cdiv(width, _COLUMNS),)](
        table=table,
        step=step,
        out=out,
        num_rows=num_rows,
        D=width,
        U=len(step.used),
        R=rank,
        COLUMNS=_COLUMNS,
        BLOCK_U=block_used,
        BLOCK_R=triton.next_power_of_2(max(rank, 1)),
        num_warps=min(max(block_used // 128, 1), 8),
        enable_fp_fusion=True,
        **pdl_options(table.device),
    )
    return out
