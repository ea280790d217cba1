"""ReplayedRouting: recorded choices of experts in the place of a router's, step by step."""

from __future__ import annotations

import torch

from seqmoe_kernels import RecordedIds


class ReplayedRouting:
    """Given to `Engine.replay`. The tensors of `recorded` are at fixed addresses on `device`, so
    that a CUDA graph can be captured once and go through all steps. After the last step comes the
    first one again.
    """

    def __init__(self, ids: torch.Tensor, device: torch.device) -> None:
        """`ids` [steps, L, K], of any integer type: distinct experts of each layer, best first."""
        step = torch.zeros(1, dtype=torch.int64, device=device)
        self.recorded = RecordedIds(ids.to(device, torch.int32).contiguous(), step)

    def advance(self) -> None:
        """Go on to the next step."""
        self.recorded.step.add_(1)

    def rewind(self, step: int = 0) -> None:
        """Let `step` come next."""
        self.recorded.step.fill_(step)
