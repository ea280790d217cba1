"""Eviction: victims chosen by a forecast, for as long as that pays."""

from __future__ import annotations

from dataclasses import dataclass, fields

from seqmoe_cli.residency.switch import GAIN, MOST_REST, REST, SETTLE
from seqmoe_kernels.eviction.expected_use import ExpectedUse
from seqmoe_kernels.eviction.ghost_cache import GhostCache

WINDOW = 64  # steps that are judged together, or as many more as it takes to
MIN_MISSES = 64  # see so many misses,
MOST_WINDOW = 256  # but not more than that: where hardly anything is missed, nothing is saved
COMPARE = 32  # steps without a forecast, for the time that they compute
RUN = 960  # steps with it until they are measured again
WARM_UP = 16  # steps that do not count after a rest: the predictor has seen nothing meanwhile


@dataclass(frozen=True)
class EvictionCosts:
    """A decode step, or several added up: experts that it lacked; of steps that were compared, how
    many it was by the forecast, and would have been by decayed counts; by the device's clock how
    long it took, and how much of that it waited."""

    absent: int = 0
    by_forecast: int = 0
    by_counts: int = 0
    stall_s: float = 0.0
    step_s: float = 0.0
    steps: int = 1

    def __add__(self, other: EvictionCosts) -> EvictionCosts:
        names = [field.name for field in fields(self)]
        return EvictionCosts(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def computing_s(self) -> float:
        """Of a step."""
        return (self.step_s - self.stall_s) / max(self.steps, 1)


NOTHING = EvictionCosts(steps=0)


@dataclass(frozen=True)
class Worth:
    """What a forecast was worth in the steps `tried`, and some `plain` ones without; if there are
    none of these, its kernels are taken to cost nothing."""

    tried: EvictionCosts
    plain: EvictionCosts = NOTHING

    @property
    def saved_misses(self) -> float:
        """Of a step; below 0 if there are more of them."""
        return (self.tried.by_counts - self.tried.by_forecast) / max(self.tried.steps, 1)

    @property
    def saved_stall_s(self) -> float:
        """Of a step: as long as it waits for as many experts."""
        both = self.tried + self.plain
        return self.saved_misses * both.stall_s / max(both.absent, 1)

    @property
    def saved(self) -> float:
        """The share of its time that a step is shorter with a forecast, its kernels included; below
        0 if it is longer."""
        step_s = self.tried.step_s / max(self.tried.steps, 1)
        cost_s = self.tried.computing_s - self.plain.computing_s if self.plain.steps else 0.0
        without_s = step_s + self.saved_stall_s - cost_s
        return 1 - step_s / without_s if without_s > 0 else 0.0

    @property
    def pays(self) -> bool:
        """A gain without a miss saved is chance."""
        return self.saved_misses > 0 and self.saved >= GAIN


class EvictionSwitch:
    """Lets decayed counts choose the victims when a forecast does not pay, and lets it try again
    after a rest.

    Window by window, what it saves is compared with what its kernels cost: misses by those that
    the ghost of the pool counts, each worth what a miss took in the same steps; kernels by the
    computing time of steps without, which are either those of the last rest or some that are put
    in. A pool turns over slowly, so that misses of steps with and without a forecast could not be
    compared themselves. Prefetch changes the computing: only steps with as much of it are.
    """

    def __init__(self) -> None:
        self.is_on, self.rests = True, False  # by the forecast; given up for a while
        self.verdict: Worth | None = None  # the last one
        self._window = NOTHING
        self._plain: dict[bool, EvictionCosts] = {}  # without a forecast, by whether prefetch is on
        self._age = 0  # steps since they were measured
        self._left, self._rest = 0, REST  # steps without that are to come; of the next rest
        self._settling = SETTLE
        self._prefetches = False

    def observe(self, step: EvictionCosts, prefetches: bool) -> bool:
        """Take a step into account, in which prefetch was on or not; returns whether the forecast
        shall choose."""
        if prefetches != self._prefetches:
            self._prefetches = prefetches
            if not self.rests:
                self._turn(True)
            self._settling = max(self._settling, SETTLE)
        if self._settling:
            self._settling -= 1
        elif self.is_on:
            self._window += step
            self._age += 1
            few = self._window.by_counts < MIN_MISSES and self._window.steps < MOST_WINDOW
            if self._window.steps >= WINDOW and not few:
                self._judge()
        else:
            self._plain[prefetches] = self._plain.get(prefetches, NOTHING) + step
            self._left -= 1
            if self._left <= 0:
                self._turn(True) if self.rests else self._judge()
        return self.is_on

    def _judge(self) -> None:
        plain = self._plain.get(self._prefetches, NOTHING)
        unknown = plain.steps < COMPARE or self._age > RUN
        worth = Worth(self._window, NOTHING if unknown else plain)
        if unknown and worth.pays:  # by its misses: it remains to be seen what they cost
            self._turn(False, COMPARE)
            return
        self.verdict = worth
        if worth.pays:
            self._rest = REST
            self._turn(True)
            return
        self._turn(False, self._rest)
        self.rests = True
        self._rest = min(2 * self._rest, MOST_REST)

    def _turn(self, on: bool, steps: int = 0) -> None:
        """To go on, or to leave the forecast out for so many `steps`."""
        if on or self.rests:
            self._window = NOTHING
        if on != self.is_on:
            self._settling = WARM_UP if on else SETTLE
            if not on:
                self._plain, self._age = {}, 0
        self.is_on, self.rests, self._left = on, False, steps


class Eviction:
    """The expert of the smallest expected use is the victim, while the switch is on; else the
    one with the smallest decayed count, and nothing is forecast for it."""

    def __init__(self, expected_use: ExpectedUse, ghost: GhostCache) -> None:
        self.switch = EvictionSwitch()
        self.is_on = True
        self._prospects, self._shadow, self._is_held = expected_use, ghost, False

    @property
    def expected_use(self) -> ExpectedUse | None:
        """By which victims are chosen; None while it rests."""
        return self._prospects if self.is_on else None

    @property
    def ghost(self) -> GhostCache | None:
        """That of the pool; None while it is at rest, when both would be the same."""
        return self._shadow if self.is_on else None

    @property
    def status(self) -> str:
        """In a word: on, comparing (left out to see what it costs) or resting (while it does not
        pay)."""
        return "on" if self.is_on else "resting" if self.switch.rests else "comparing"

    def hold(self) -> None:
        """Stay on from now on, whether it pays or not: to be measured."""
        self._is_held = True

    def observe(self, step: EvictionCosts, prefetches: bool) -> None:
        """Learn from a decode step whether it pays."""
        on = self._is_held or self.switch.observe(step, prefetches)
        if on and not self.is_on:
            self._prospects.steps.zero_()  # what was foreseen before the rest is not judged
        self.is_on = on
