"""Eviction: victims chosen by a forecast, for as long as that pays."""

from __future__ import annotations

from seqmoe_cli.residency.stats import StepStats
from seqmoe_cli.residency.switch import EvictionVerdict, Lengths, Switch
from seqmoe_kernels.eviction.expected_use import ExpectedUse
from seqmoe_kernels.eviction.ghost_cache import GhostCache

# After a rest the predictor has seen nothing for a while. Where hardly anything is missed in the
# steps tried, nothing is saved.
LENGTHS = Lengths(settle_on=16, tried=128, plain=32, run=960)


class Eviction:
    """While the switch is on, the victim is the expert with the smallest expected use; else the one
    with the smallest decayed count, and nothing is forecast for it."""

    def __init__(self, expected_use: ExpectedUse, ghost: GhostCache) -> None:
        self.switch = Switch(EvictionVerdict, LENGTHS)
        self._expected_use, self._ghost = expected_use, ghost

    @property
    def expected_use(self) -> ExpectedUse | None:
        """By which victims are chosen; None while it is off."""
        return self._expected_use if self.switch.is_on else None

    @property
    def ghost(self) -> GhostCache | None:
        """What the pool would hold by decayed counts; None while it is off, when that is the
        pool itself."""
        return self._ghost if self.switch.is_on else None

    @property
    def status(self) -> str:
        """On, comparing or resting."""
        return self.switch.status

    def observe(self, step: StepStats, regime: str) -> None:
        """Learn from a decode step whether it pays; `regime` is how prefetch stands."""
        before = self.switch.is_on
        if self.switch.observe(step, regime) and not before:
            self._expected_use.steps.zero_()  # what was forecast before is not compared
