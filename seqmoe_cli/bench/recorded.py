"""RecordedRouting: a trace that a benchmark replays in the place of the router's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from seqmoe_cli.bench.blurred import ACCURACY, blurred_names, blurred_uses
from seqmoe_cli.bench.matrix import Case
from seqmoe_cli.errors import SeqmoeError
from seqmoe_cli.forecast.shipped import SHIPPED, open_trace
from seqmoe_cli.forecast.trace import DECODE, Trace
from seqmoe_cli.residency.replayed import ReplayedRouting
from seqmoe_weights.config import ModelConfig


@dataclass(frozen=True)
class RecordedRouting:
    """`trace` holds the tokens of the answers alone: its prompts are not replayed. `accuracy`: how
    well simulated look-ahead knows it, see `blurred_names`."""

    name: str
    trace: Trace
    accuracy: Sequence[tuple[float, float]] = ACCURACY

    @classmethod
    def open(cls, name: str) -> RecordedRouting:
        """A shipped trace or a file, see `open_trace`; it must have two tokens to replay."""
        trace = open_trace(name)
        trace = trace.select(trace.phase == DECODE)
        if len(trace) < 2:
            raise SeqmoeError(
                f"trace {name} has {len(trace)} tokens of answers, at least 2 are needed",
                f"record a longer one, or use one that comes with seqmoe: {', '.join(SHIPPED)}",
            )
        return cls(name, trace)

    def first(self, num: int) -> RecordedRouting:
        """The same, but its first `num` tokens only."""
        return replace(self, trace=self.trace.select(np.arange(len(self.trace)) < num))

    def check_fits(self, model: str, config: ModelConfig) -> None:
        """Raise `SeqmoeError` unless the model has the layers and experts of the trace."""
        trace = self.trace
        shapes = (
            f"{layers} layers of {experts} experts"
            for layers, experts in (
                (trace.num_layers, trace.num_experts),
                (config.num_hidden_layers, config.num_experts),
            )
        )
        recorded, present = shapes
        if recorded != present:
            raise SeqmoeError(
                f"trace {self.name} was recorded from {recorded}, {model} has {present}",
                "replay it with a model or --shape like the recorded one, or record another: "
                "seqmoe trace",
            )

    def cases(self, gens: Sequence[int] | None, depths: Sequence[int]) -> tuple[Case, ...]:
        """All tokens of the trace are replayed, the last ones timed: as many as `gens` says, or the
        second half. The first token is never timed, as it comes as a prompt."""
        total = len(self.trace)
        for num in gens or ():
            if not 1 <= num < total:
                raise SeqmoeError(
                    f"-n {num}: of the {total} tokens of trace {self.name}, 1 to {total - 1} can "
                    "be timed",
                    f"leave -n out to time the last {total // 2}",
                )
        return tuple(
            Case(0, num, depth, num_untimed=total - num)
            for depth in depths
            for num in gens or (total // 2,)
        )

    def replayed(
        self, device: torch.device, prefetch_slots: int = 0, forecast: bool = False
    ) -> ReplayedRouting:
        """What an engine on `device` takes; with prefetch into a pool of so many slots, simulated
        look-ahead too, and on request a simulated forecast."""
        experts, named, expected = self.trace.experts, None, None
        sizes = self.trace.num_experts, prefetch_slots
        if prefetch_slots:
            named = torch.from_numpy(blurred_names(experts, *sizes, self.accuracy))
        if forecast:
            expected = torch.from_numpy(blurred_uses(experts, *sizes))
        tokens = None
        if self.trace.token_ids is not None:
            tokens = torch.from_numpy(self.trace.token_ids.astype("int64"))
        ids = torch.from_numpy(experts.astype("int32"))
        return ReplayedRouting(ids, device, named, expected, tokens)
