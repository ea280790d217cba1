"""A norm and the linear layer behind it, when the normed vector is wanted too: the router."""

from __future__ import annotations

import torch

from seqmoe_kernels.common.checks import check_kernel_device
from seqmoe_kernels.common.verb import verb
from seqmoe_kernels.dense.linear import (
    Matrix,
    check_linears,
    linear_reference,
    linears,
    one_token,
    tiling_of,
)
from seqmoe_kernels.dense.norm import Norm, rms_norm, rms_norm_reference


def normed_linear_reference(
    x: torch.Tensor, norm: Norm, matrix: Matrix, more: Matrix | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    h = rms_norm_reference(x, *norm)
    matrices = (matrix,) if more is None else (matrix, more)
    return h, torch.cat([linear_reference(h, each) for each in matrices], dim=1)


@verb(normed_linear_reference)
def normed_linear(
    x: torch.Tensor, norm: Norm, matrix: Matrix, more: Matrix | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return h = norm(x), [T, in], and `linear(h, matrix)`; with `more`, its result behind that."""
    check_kernel_device(x)
    matrices = [matrix] if more is None else [matrix, more]
    check_linears(x, matrices, norm, None)
    if x.shape[0] == 1:
        h = torch.empty_like(x)
        # the tiling that `matrix` has by itself, so that `more` does not change a bit of its result
        tiling = tiling_of(x, [matrix])
        return h, one_token(x, matrices, norm, None, tiling, h)
    h = rms_norm.launch(x, *norm)
    return h, torch.cat(linears.launch(h, matrices), dim=1)
