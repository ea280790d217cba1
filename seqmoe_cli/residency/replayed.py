"""ReplayedRouting: recorded choices of experts in the place of a router's, step by step."""

from __future__ import annotations

import torch


class ReplayedRouting:
    """Given to `Engine.replay`. `ids` int32 [steps, L, K] and `step` int64 [1], the number of the
    step that comes next, are tensors at fixed addresses on `device`, so that a CUDA graph can be
    captured once and go through all steps. After the last step comes the first one again.
    """

    def __init__(self, ids: torch.Tensor, device: torch.device) -> None:
        """`ids` [steps, L, K], of any integer type: distinct experts of each layer, best first."""
        self.ids = ids.to(device, torch.int32).contiguous()
        self.step = torch.zeros(1, dtype=torch.int64, device=device)

    def choose(self, layer: int) -> torch.Tensor:
        """int32 [1, K]: the experts of `layer` in this step. The host waits for nothing."""
        return self.ids[:, layer].index_select(0, self.step)

    def advance(self) -> None:
        """Go on to the next step."""
        self.step.add_(1).remainder_(len(self.ids))

    def rewind(self, step: int = 0) -> None:
        """Let `step` come next."""
        self.step.fill_(step)
