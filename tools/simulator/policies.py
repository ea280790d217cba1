"""Policies of the simulator alone: oracles, which know the future, and S3-FIFO, to compare with.
Those that the engine has, too, are in `scores.py`."""

from __future__ import annotations

from collections import deque

import numpy as np

from seqmoe_cli.residency.policies import Ints
from tools.simulator.events import TraceEvents
from tools.simulator.scores import DecayedFrequency, Lru, Policy, ScoredPolicy


def lru(routing: TraceEvents, num_slots: int) -> Policy:
    return Lru(routing.num_experts)


def belady(routing: TraceEvents, num_slots: int) -> Policy:
    return Belady(routing)


def next_use(routing: TraceEvents) -> Ints:
    """[T * L, K]: the event that uses the same expert next; T * L if there is none."""
    events = routing.events
    flat = events.ravel()
    order = np.argsort(flat, kind="stable")  # expert by expert, the uses of each in time
    again = flat[order[1:]] == flat[order[:-1]]
    found = np.full(flat.shape, len(events))
    found[order[:-1][again]] = order[1:][again] // events.shape[1]
    return found.reshape(events.shape)


def first_use(routing: TraceEvents) -> Ints:
    """[all experts]: the first event that uses each expert; T * L if there is none."""
    events = routing.events
    first = np.full(routing.num_experts, len(events))
    first[events[::-1].ravel()] = np.repeat(np.arange(len(events))[::-1], events.shape[1])
    return first


class Belady(ScoredPolicy):
    """The victim's next use is furthest away. It knows the future: no policy that loads on demand
    needs fewer loads. Score: minus the event of the next use, shifted to stay above 0."""

    def __init__(self, routing: TraceEvents) -> None:
        super().__init__(routing.num_experts)
        self._event, self._last = -1, len(routing.events)
        self._next_use = next_use(routing)
        self.score[:-1] = self._last - first_use(routing)

    def start_token(self, token: int) -> None:
        """Time goes by events."""

    def use(self, layer: int, experts: Ints) -> None:
        self._event += 1
        self.score[experts] = self._last - self._next_use[self._event]


class WindowedBelady:
    """Belady that sees the uses of the next `window` tokens only. Experts that are not used in them
    are evicted first, the smallest decayed count before all others."""

    def __init__(self, routing: TraceEvents, window: int, half_life: float) -> None:
        self._exact = Belady(routing)
        self._counts = DecayedFrequency(routing.num_experts, half_life)
        self._span, self._end = window * routing.num_layers, len(routing.events)
        self._event = -1

    def start_token(self, token: int) -> None:
        self._counts.start_token(token)

    def use(self, layer: int, experts: Ints) -> None:
        self._event += 1
        self._exact.use(layer, experts)
        self._counts.use(layer, experts)

    def victims(self, owner: Ints, barred: Ints, incoming: Ints) -> Ints:
        chooser = ScoredPolicy(len(self._counts.score) - 1)
        exact = self._exact.score[:-1]  # _end - next use
        seen = exact >= self._end - (self._event + 1 + self._span)
        above = self._counts.now + (1 << 40)
        chooser.score[:-1] = np.where(seen, above + exact, self._counts.score[:-1])
        return chooser.victims(owner, barred, incoming)


class S3Fifo:
    """S3-FIFO with a small queue for a tenth of the slots, a main queue, and a ghost queue as long
    as the main one. What was used again while it was in the small queue goes on to the main one."""

    def __init__(self, num_slots: int) -> None:
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghost: dict[int, None] = {}  # in the order of entering
        self._uses: dict[int, int] = {}  # of the experts in a queue, since they entered: 0 to 3
        self._slot: dict[int, int] = {}
        self._most_small = max(num_slots // 10, 1)
        self._most_ghosts = num_slots - self._most_small

    def start_token(self, token: int) -> None:
        """Time goes by loads."""

    def use(self, layer: int, experts: Ints) -> None:
        for expert in experts.tolist():
            self._uses[expert] = min(self._uses.get(expert, -1) + 1, 3)

    def victims(self, owner: Ints, barred: Ints, incoming: Ints) -> Ints:
        kept = set(barred.tolist())
        empty = iter(np.flatnonzero(owner < 0).tolist())
        slots = []
        for expert in incoming.tolist():
            slot = next((slot for slot in empty if slot not in kept), -1)
            slot = self._evict(kept) if slot < 0 else slot
            kept.add(slot)
            slots.append(slot)
            self._enter(expert, slot)
        return np.array(slots)

    def _enter(self, expert: int, slot: int) -> None:
        if expert not in self._slot:
            known = expert in self._ghost
            (self._main if known else self._small).append(expert)
            self._ghost.pop(expert, None)
            self._uses[expert] = -1  # the use that it is loaded for makes it 0
        self._slot[expert] = slot

    def _evict(self, kept: set[int]) -> int:
        small, skipped = len(self._small) > self._most_small, 0
        while True:
            queue = self._small if small else self._main
            if skipped >= len(queue):  # all of it must stay
                small, skipped = not small, 0
                continue
            expert = queue.popleft()
            if self._slot[expert] in kept:
                queue.append(expert)
                skipped += 1
            elif self._uses[expert] > 0:
                self._uses[expert] = 0 if small else self._uses[expert] - 1
                self._main.append(expert)
                small, skipped = len(self._small) > self._most_small, 0
            else:
                return self._leave(expert, small)

    def _leave(self, expert: int, small: bool) -> int:
        self._uses.pop(expert)
        if small:
            self._ghost[expert] = None
            if len(self._ghost) > self._most_ghosts:
                self._ghost.pop(next(iter(self._ghost)))
        return self._slot.pop(expert)
