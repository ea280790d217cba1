"""A pool whose victims are chosen by a forecast, with the ghost cache beside it."""

from __future__ import annotations

import torch

from seqmoe_cli.residency.policies import LOG2_1P
from seqmoe_cli.residency.pool import make_expected_use
from seqmoe_kernels.eviction.calibration import calibrate, calibrate_reference
from seqmoe_kernels.eviction.expected_use import update_expected_use, update_expected_use_reference
from seqmoe_kernels.eviction.ghost_cache import GhostCache
from seqmoe_kernels.pool.resolve import resolve_reference
from seqmoe_kernels.state import RULE_NOW, RULE_TICK, PoolState
from tools.simulator.scores import DecayedFrequency


class ForecastPool:
    """A pool whose victims are chosen by a forecast, and its ghost cache."""

    def __init__(
        self, num: int, top_k: int, slots: int, device: torch.device, by_kernels: bool
    ) -> None:
        self.top_k, self.by_kernels = top_k, by_kernels
        counts = DecayedFrequency(num)
        self.pool = PoolState.cold(num, slots, device)
        self.pool.rule.copy_(torch.tensor([counts.tick, counts.now]))
        self.pool = self.pool._replace(log_sums=torch.from_numpy(LOG2_1P).int().to(device))
        self.expected_use = make_expected_use(num, slots, device)
        self.ghost = GhostCache.unknown(num, device)

    def tick(self) -> None:
        self.pool.rule[RULE_NOW] += self.pool.rule[RULE_TICK]

    def begin(self, used: torch.Tensor, expected: torch.Tensor) -> None:
        self.tick()
        judge = calibrate.launch if self.by_kernels else calibrate_reference
        update = update_expected_use.launch if self.by_kernels else update_expected_use_reference
        judge(used, self.top_k, self.pool, self.expected_use, self.ghost)
        update(expected, self.pool, self.expected_use, self.ghost)

    def use(self, ids: torch.Tensor, first_to_come: int) -> None:
        resolve_reference(ids, self.pool, None, self.expected_use, first_to_come)
