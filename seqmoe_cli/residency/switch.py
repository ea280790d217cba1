"""KillSwitch: whether prefetch pays, by the device's clock, with and without. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

SETTLE = 4  # steps after each change that do not count: kernels are compiled, graphs captured
TRY = 32  # steps with prefetch that are judged
COMPARE = 32  # steps without it, right behind them, that they are compared with
RUN = 224  # steps with it once it has paid, until it is compared again
REST = 64  # steps without it once it has not; twice as many after the next try that fails
MOST_REST = 1024
MIN_COPIES = 16  # fewer, or fewer misses, say nothing
MAX_COPIES_PER_USE = 4.0  # more bytes are not worth a miss avoided
GAIN = 0.01  # of a step's time, to be worth it


@dataclass(frozen=True)
class StepCosts:
    """A decode step, or several added up: records prefetched, how many of them were used, be it
    that they were waited for; how many misses there were, or would have been without prefetch; by
    the device's clock how long it took, and how much of that it waited."""

    copies: int = 0
    used: int = 0
    absent: int = 0
    stall_s: float = 0.0
    step_s: float = 0.0
    steps: int = 1

    def __add__(self, other: StepCosts) -> StepCosts:
        return StepCosts(*(a + b for a, b in zip(self._all(), other._all(), strict=True)))  # type: ignore[arg-type]

    def _all(self) -> tuple[int, int, int, float, float, int]:
        return self.copies, self.used, self.absent, self.stall_s, self.step_s, self.steps


NOTHING = StepCosts(steps=0)


@dataclass(frozen=True)
class Verdict:
    """Time of the steps `tried`, and what they would have taken without prefetch: the computing of
    the steps they are compared with, and for each absent expert what a miss took there."""

    tried: StepCosts
    without_s: float

    @property
    def saved(self) -> float:
        """The share of its time that a step is shorter with prefetch; below 0 if it is longer."""
        return 1 - self.tried.step_s / self.without_s if self.without_s else 0.0

    @property
    def copies_per_use(self) -> float | None:
        """Records copied for each that spared a fetch or shortened one; None if none did."""
        return self.tried.copies / self.tried.used if self.tried.used else None

    @property
    def pays(self) -> bool:
        """A gain without copies is chance."""
        copies, used = self.tried.copies, self.tried.used
        return self.saved >= GAIN and MIN_COPIES <= copies <= MAX_COPIES_PER_USE * used


class KillSwitch:
    """Turns prefetch off when it does not pay, and lets it try again after a rest.

    It is tried, then left out for as long, and the two are compared: what its kernels add to the
    computing counts, and so do fetches that a copy slows down. Steps differ in how many experts
    they lack; both sides are brought to the same number.
    """

    def __init__(self, fetch_s: float) -> None:
        self.is_on, self.rests = True, False  # asking for copies; given up for a while
        self.verdict: Verdict | None = None  # the last one
        self._fetch_s = fetch_s  # until a miss was measured
        self._left, self._rest = TRY, REST  # steps of what is going on, and of the next rest
        self._settling = SETTLE
        self._tried = self._plain = NOTHING

    def observe(self, step: StepCosts) -> bool:
        """Take a step into account; returns whether prefetch shall be on."""
        if self._settling:
            self._settling -= 1
            return self.is_on
        if self.is_on:
            self._tried += step
        else:
            self._plain += step
        self._left -= 1
        if self._left <= 0:
            before = self.is_on
            self._go_on()
            self._settling = SETTLE * (self.is_on != before)
        return self.is_on

    def _go_on(self) -> None:
        if self.is_on:
            self.is_on, self._left, self._plain = False, COMPARE, NOTHING
            return
        if not self.rests:
            self.verdict = Verdict(self._tried, self._without_s())
            if not self.verdict.pays:
                self.rests, self._left = True, self._rest
                self._rest = min(2 * self._rest, MOST_REST)
                return
            self._rest = REST
        self._left = TRY if self.rests else RUN
        self.is_on, self.rests, self._tried = True, False, NOTHING

    def _without_s(self) -> float:
        plain, tried = self._plain, self._tried
        computing_s = (plain.step_s - plain.stall_s) / max(plain.steps, 1)
        miss_s = plain.stall_s / plain.absent if plain.absent >= MIN_COPIES else self._fetch_s
        return computing_s * tried.steps + miss_s * tried.absent
