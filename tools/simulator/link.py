"""The link between host memory and the pool: how long copies take, and how they share it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seqmoe_cli.residency.policies import Ints
from tools.simulator.schedule import schedule

Floats = NDArray[np.floating]
PREFETCH_BY = ("gpu", "thread")


@dataclass(frozen=True)
class Link:
    """Times in seconds; the defaults are those of Qwen3-30B-A3B-FP8 on an H200 (PCIe 5 x16).

    `layer_s` is a layer's time when nothing is missing. A fetch runs in the graph: it takes
    `launch_s`, then moves its records at `fetch_bytes_per_s`. A prefetch starts `delay_s` after the
    request. `prefetch_by`, one of PREFETCH_BY, is what copies it: "gpu", kernels beside the step,
    as fast as a fetch; or "thread", by DMA at `dma_bytes_per_s`. A DMA copy is still requested if
    it ends at most `slack` times the time of a fetch too late: waiting for it is shorter than a
    fetch. While a fetch and DMA share the link, the fetch has `fetch_share` of its own speed, and
    the copy has the rest of its own speed.
    """

    record_bytes: int = 4_722_688
    layer_s: float = 1.7e-3 / 48
    fetch_bytes_per_s: float = 48e9
    launch_s: float = 1.2e-6
    prefetch_by: str = "gpu"
    delay_s: float = 12e-6
    dma_bytes_per_s: float = 52e9
    slack: float = 0.0
    fetch_share: float = 0.37  # 116 us became 314 us

    @property
    def copy_bytes_per_s(self) -> float:
        return self.fetch_bytes_per_s if self.prefetch_by == "gpu" else self.dma_bytes_per_s

    @property
    def fetch_s(self) -> float:
        return self.record_bytes / self.fetch_bytes_per_s

    @property
    def copy_s(self) -> float:
        return self.record_bytes / self.copy_bytes_per_s


@dataclass(eq=False)
class Copy:
    """A prefetch requested during `token`, for the event `due`. `start_s`: when it starts, if the
    link is free. `left`: what is still to copy, from 1 to 0. `dropped`: no event waits for it."""

    expert: int
    slot: int
    token: int = 0
    due: int = 0
    left: float = 1.0
    dropped: bool = False
    start_s: float = 0.0


class LinkClock(ABC):
    """The copies on the link, and the time. Copies run one after the other, in the order of their
    requests."""

    def __init__(self, link: Link) -> None:
        self.link, self.now = link, 0.0
        self.copies: deque[Copy] = deque()
        self.landed: list[Copy] = []  # for the caller to take away

    def request(self, copy: Copy) -> None:
        """A copy is requested now."""
        copy.start_s = self.now + self.link.delay_s
        self.copies.append(copy)

    def run(self, until: float) -> None:
        """Time goes by without a fetch."""
        while self.copies:
            head = self.copies[0]
            start = max(self.now, head.start_s)
            end = start + head.left * self.link.copy_s
            if end > until:
                head.left -= max(until - start, 0) / self.link.copy_s
                break
            self._land(end)
        self.now = until

    def ready_s(self) -> float:
        """How long it takes until a copy that is requested now can start."""
        return max(self.link.delay_s, sum(copy.left for copy in self.copies) * self.link.copy_s)

    @abstractmethod
    def order(self, profit: Ints, seconds: Floats, most: int) -> Ints:
        """Which copies to request now, and in which order, as indices [up to `most`]. `profit` [n]:
        what each copy is worth, above 0. `seconds` [n]: the time until it is wanted."""

    @abstractmethod
    def fetch(self, num: int) -> None:
        """Time goes by until `num` records have been fetched."""

    @abstractmethod
    def is_sooner(self, copy: Copy) -> bool:
        """Whether waiting for the copy is shorter than a fetch of the same expert."""

    @abstractmethod
    def wait(self, copies: Sequence[Copy]) -> None:
        """Time goes by until all of them have landed."""

    @abstractmethod
    def cut(self, event: int) -> list[Copy]:
        """End the copies for this event and earlier ones, if that can be done; returns them."""

    def _land(self, time: float) -> None:
        copy = self.copies.popleft()
        copy.left = 0.0
        self.landed.append(copy)
        self.now = time


class GpuClock(LinkClock):
    """The copy kernels move records in pieces. They stand still during a fetch. A copy that is not
    wanted any more is ended. One that an event waits for goes on at once, without a delay. So any
    part of a copy that can be done in time is worth having."""

    def order(self, profit: Ints, seconds: Floats, most: int) -> Ints:
        """The engine's rule: one copy behind an event, the likeliest of the earliest layer."""
        able = np.flatnonzero(seconds >= self.ready_s())
        return able[np.lexsort((-profit[able], seconds[able]))][: min(most, 1)]

    def fetch(self, num: int) -> None:
        self.now += self.link.launch_s + num * self.link.fetch_s

    def is_sooner(self, copy: Copy) -> bool:
        return True

    def wait(self, copies: Sequence[Copy]) -> None:
        self.now += self.link.launch_s
        while any(copy in self.copies for copy in copies):
            self._land(self.now + self.copies[0].left * self.link.fetch_s)

    def cut(self, event: int) -> list[Copy]:
        ended = [copy for copy in self.copies if copy.due <= event]
        for copy in ended:
            self.copies.remove(copy)
        return ended


class ThreadClock(LinkClock):
    """A thread starts DMA copies, each of which then runs to its end."""

    def order(self, profit: Ints, seconds: Floats, most: int) -> Ints:
        """Unit jobs with deadlines; a job is one record."""
        spare = seconds - self.ready_s() + self.link.slack * self.link.fetch_s
        units = np.floor(spare / self.link.copy_s + 1e-9).astype(np.int64)
        able = np.flatnonzero(units >= 1)
        return able[schedule(profit[able], units[able], most)]

    def fetch(self, num: int) -> None:
        """Copies that the thread has started by now go on beside the fetch. It starts the others
        when the fetch has ended."""
        started = sum(copy.start_s <= self.now for copy in self.copies)
        held = list(self.copies)[started:]
        left, share = num * self.link.fetch_s, self.link.fetch_share
        self.now += self.link.launch_s
        while started and left > 0:
            head = self.copies[0]
            alone = head.left * self.link.copy_s / (1 - share)  # until the copy is done
            spent = min(alone, left / share)
            left -= spent * share
            if spent < alone:
                head.left -= spent * (1 - share) / self.link.copy_s
                self.now += spent
            else:
                self._land(self.now + spent)
                started -= 1
        self.now += max(left, 0.0)
        for copy in held:
            copy.start_s = self.now + self.link.delay_s

    def is_sooner(self, copy: Copy) -> bool:
        return self.lands_at(copy) - self.now < self.link.fetch_s

    def wait(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            if copy in self.copies:
                self.run(self.lands_at(copy))

    def cut(self, event: int) -> list[Copy]:
        return []

    def lands_at(self, wanted: Copy) -> float:
        """When a copy that is under way lands, if nothing is fetched before."""
        time = self.now
        for copy in self.copies:
            time = max(time, copy.start_s) + copy.left * self.link.copy_s
            if copy is wanted:
                break
        return time


def clock_of(link: Link) -> LinkClock:
    return GpuClock(link) if link.prefetch_by == "gpu" else ThreadClock(link)
