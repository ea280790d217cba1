"""ReplayedRouting: recorded choices of experts in the place of a router's, step by step."""

from __future__ import annotations

import torch

from seqmoe_kernels import RecordedIds, StepForecast


class ReplayedRouting:
    """Given to `Engine.replay`. The tensors of `recorded` are at fixed addresses on `device`, so
    that a CUDA graph can be captured once and go through all steps. After the last step comes the
    first one again. `predicted` takes the place of look-ahead, which has no true state to look at,
    and `expected` that of a predictor.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        device: torch.device,
        predicted: torch.Tensor | None = None,
        expected: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """`ids` [steps, L, K], of any integer type: distinct experts of each layer, best first.
        `predicted` [steps, L, D, n]: what each layer says the D next ones will use, -1 for none.
        `expected` [steps, N]: how often each expert is forecast to be used in a step.
        `tokens` [steps]: the token that each step evaluated.
        """
        step = torch.zeros(1, dtype=torch.int64, device=device)
        self.recorded = RecordedIds(ids.to(device, torch.int32).contiguous(), step)
        self.predicted: RecordedIds | None = None
        if predicted is not None:
            self.predicted = RecordedIds(predicted.to(device, torch.int32).contiguous(), step)
        self.step_forecast: StepForecast | None = None
        if expected is not None:
            self.step_forecast = StepForecast(expected.to(device, torch.float32).contiguous(), step)
        self._tokens = None if tokens is None else tokens.to(device, torch.int64)

    def token(self, own: torch.Tensor) -> torch.Tensor:
        """The token that the next step evaluated when it was recorded, int64 [1]; the one that it
        evaluates now if that is not known."""
        if self._tokens is None:
            return own
        return self._tokens.index_select(0, self.recorded.step % len(self._tokens))

    def advance(self) -> None:
        """Go on to the next step."""
        self.recorded.step.add_(1)

    def rewind(self, step: int = 0) -> None:
        """Let `step` come next."""
        self.recorded.step.fill_(step)
