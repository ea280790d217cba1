"""Switch: leaves out for a while what is meant to make steps faster, compares, and turns it off as
long as it does not pay, by the device's clock. Prefetch has one, and eviction by a forecast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from seqmoe_cli.residency.stats import StepStats, ratio

GAIN = 0.01  # of a step's time, to be worth it
REST = 64  # steps without it once it has not paid; twice as many after the next try that fails
MOST_REST = 1024
MIN_COPIES = 16  # fewer prefetches, or fewer misses, say nothing
MAX_COPIES_PER_USE = 4.0  # more bytes are not worth a miss avoided


class Verdict(Protocol):
    """`saved`: the share of its time that a step is shorter with it; below 0 if it is longer."""

    @property
    def saved(self) -> float: ...
    @property
    def pays(self) -> bool: ...


@dataclass(frozen=True)
class PrefetchVerdict:
    """The time of the steps `tried`, and what they would have taken without prefetch."""

    tried: StepStats
    without_s: float

    @classmethod
    def of(cls, tried: StepStats, plain: StepStats, fetch_s: float) -> PrefetchVerdict:
        """Steps differ in how many experts they lack; both sides are brought to the same number:
        the computing of `plain` steps, and for each expert that the tried ones lacked what a miss
        took there, or `fetch_s` where there were too few."""
        compute_s = plain.compute_s / max(plain.num_tokens, 1)
        miss_s = plain.stall_s / plain.absent if plain.absent >= MIN_COPIES else fetch_s
        return cls(tried, compute_s * tried.num_tokens + miss_s * tried.absent)

    @property
    def saved(self) -> float:
        return 1 - self.tried.step_s / self.without_s if self.without_s else 0.0

    @property
    def uses(self) -> int:
        """Copies that spared a fetch or shortened one."""
        return self.tried.prefetch_hits + self.tried.prefetches_late

    @property
    def copies_per_use(self) -> float | None:
        """Records copied for each that was of use; None if none was."""
        return self.tried.prefetches / self.uses if self.uses else None

    @property
    def pays(self) -> bool:
        """A gain without copies is chance."""
        copies = self.tried.prefetches
        return self.saved >= GAIN and MIN_COPIES <= copies <= MAX_COPIES_PER_USE * self.uses


@dataclass(frozen=True)
class EvictionVerdict:
    """What a forecast was worth in the steps `tried`. A pool turns over slowly, so that the misses
    of steps with and without a forecast cannot be compared: the device counts those that decayed
    counts would have had in the same steps. What the kernels of the forecast cost is known from the
    computing of the steps without them, `plain`."""

    tried: StepStats
    plain: StepStats

    @property
    def saved_misses(self) -> float:
        """Of a step; below 0 if there are more of them."""
        saved = self.tried.missed_by_counts - self.tried.missed_by_forecast
        return ratio(saved, self.tried.num_tokens)

    @property
    def saved_stall_s(self) -> float:
        """Of a step: as long as it waits for as many experts."""
        both = self.tried + self.plain
        return self.saved_misses * both.stall_s / max(both.absent, 1)

    @property
    def saved(self) -> float:
        """The kernels of the forecast included."""
        step_s = ratio(self.tried.step_s, self.tried.num_tokens)
        compute_s = ratio(self.tried.compute_s, self.tried.num_tokens)
        without_s = step_s + self.saved_stall_s
        if self.plain.num_tokens:
            without_s -= compute_s - self.plain.compute_s / self.plain.num_tokens
        return 1 - step_s / without_s if without_s > 0 else 0.0

    @property
    def pays(self) -> bool:
        """A gain without a miss saved is chance."""
        return self.saved_misses > 0 and self.saved >= GAIN


class Lengths(NamedTuple):
    """In steps. Those right behind a change do not count: kernels are compiled, graphs captured."""

    settle: int = 4
    settle_on: int = 4  # after it was turned on again
    tried: int = 32  # with it, that are judged
    plain: int = 32  # without it, right behind them, that they are compared with
    run: int = 224  # with it once it has paid, until it is compared again


V = TypeVar("V", bound=Verdict)


class Switch(Generic[V]):
    """`judge` says what steps with it, added up, were worth compared with `plain` ones without."""

    def __init__(
        self, judge: Callable[[StepStats, StepStats], V], lengths: Lengths | None = None
    ) -> None:
        self.is_on = True
        self.is_held = False  # on from now on, whether it pays or not: to be measured
        self.rests = False  # given up for a while
        self.verdict: V | None = None  # the last one
        self._judge, self._lengths = judge, lengths or Lengths()
        self._rest = REST
        self._regime: str | None = None
        self._settling, self._left = self._lengths.settle, self._lengths.tried
        self._with = self._without = StepStats("decode")

    @property
    def status(self) -> str:
        """In a word: on, comparing (left out to see what it saves) or resting (while it does not
        pay)."""
        return "on" if self.is_on else "resting" if self.rests else "comparing"

    def observe(self, step: StepStats, regime: str = "on") -> bool:
        """Take a decode step into account; returns whether the next ones shall have it. `regime`
        says how another switch stands: steps of different regimes are not compared, and those in
        which that one is comparing count for nothing."""
        if self.is_held or regime == "comparing":
            return self.is_on
        if self._regime not in (None, regime) and not self.rests:
            self._turn(True, self._lengths.tried)
        self._regime = regime
        if self._settling:
            self._settling -= 1
            return self.is_on
        if self.is_on:
            self._with += step
        else:
            self._without += step
        self._left -= 1
        if self._left <= 0:
            self._go_on()
        return self.is_on

    def _go_on(self) -> None:
        if self.is_on:
            self._turn(False, self._lengths.plain)
        elif self.rests:
            self._turn(True, self._lengths.tried)
        else:
            self.verdict = self._judge(self._with, self._without)
            if self.verdict.pays:
                self._rest = REST
                self._turn(True, self._lengths.run)
            else:
                self.rests, self._left = True, self._rest
                self._rest = min(2 * self._rest, MOST_REST)

    def _turn(self, on: bool, steps: int) -> None:
        if on != self.is_on:
            self._settling = self._lengths.settle_on if on else self._lengths.settle
        if on:
            self._with = StepStats("decode")
        else:
            self._without = StepStats("decode")
        self.is_on, self.rests, self._left = on, False, steps
