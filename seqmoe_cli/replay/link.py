"""The link between host memory and the pool: how long copies take, and how they share it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Times in seconds; the defaults are those of Qwen3-30B-A3B-FP8 on an H200 (PCIe 5 x16).

    `layer_s` is a layer's time when nothing is missing. A fetch runs in the graph: `launch_s`, then
    its records at `fetch_bytes_per_s`. A prefetch is a DMA copy at `dma_bytes_per_s`; a thread
    starts it `delay_s` after the request, or after the end of a fetch that it has to let pass.
    While a fetch and a DMA copy share the link, the fetch has `fetch_share` of its own speed and
    the copy the rest of its own.
    """

    record_bytes: int = 4_722_688
    layer_s: float = 1.7e-3 / 48
    fetch_bytes_per_s: float = 48e9
    dma_bytes_per_s: float = 52e9
    launch_s: float = 1.2e-6
    delay_s: float = 40e-6
    fetch_share: float = 0.37  # 116 us became 314 us

    @property
    def fetch_s(self) -> float:
        return self.record_bytes / self.fetch_bytes_per_s

    @property
    def copy_s(self) -> float:
        return self.record_bytes / self.dma_bytes_per_s


@dataclass
class Copy:
    """A prefetch asked for during `token`: `start_s` is when the thread starts it, if the link is
    free; `left` what is still to copy, from 1 to 0; `dropped`: nobody waits for it."""

    expert: int
    slot: int
    token: int = 0
    left: float = 1.0
    dropped: bool = False
    start_s: float = 0.0


class LinkClock:
    """What is on the link at a time. Copies run one after the other, in the order of requests."""

    def __init__(self, link: Link) -> None:
        self.link, self.now = link, 0.0
        self.copies: deque[Copy] = deque()
        self.landed: list[Copy] = []  # for the caller to take away

    def request(self, copy: Copy) -> None:
        """The thread is asked for a copy now."""
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

    def fetch(self, num: int) -> None:
        """Time goes by until `num` records have been fetched. Copies that the thread had started
        by now go on at the same time; it turns to the others when the fetch has ended."""
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

    def lands_at(self, wanted: Copy) -> float:
        """When a copy that is under way will be here if nothing is fetched before."""
        time = self.now
        for copy in self.copies:
            time = max(time, copy.start_s) + copy.left * self.link.copy_s
            if copy is wanted:
                break
        return time

    def backlog_s(self) -> float:
        """How long the link is busy with what is under way."""
        return sum(copy.left for copy in self.copies) * self.link.copy_s

    def _land(self, time: float) -> None:
        self.landed.append(self.copies.popleft())
        self.now = time
