"""Flight: the prefetches of a replay, from the request to the landing, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seqmoe_cli.replay.link import Copy, LinkClock
from seqmoe_cli.replay.prefetch import Prefetch
from seqmoe_cli.replay.table import SlotTable
from seqmoe_cli.residency.policies import ONE, Ints, Policy
from seqmoe_cli.residency.schedule import schedule

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Prefetching:
    """`source` None: no prefetch. At most `in_flight` copies are under way, at most `budget` are
    asked for in a token, behind each of the events that `every` divides; a candidate less probable
    than `least` is left alone. A copy may land `slack` times the time of a fetch after it is
    wanted: it is waited for, and that is sooner."""

    source: Prefetch | None = None
    in_flight: int = 2
    budget: int = 64
    least: float = 0.25
    slack: float = 0.0
    every: int = 1


class Flight:
    """A slot whose copy is under way is out of the lookup table and no victim; one whose copy has
    landed is no victim until the event for which it was made has passed."""

    def __init__(
        self, table: SlotTable, clock: LinkClock, policy: Policy, rules: Prefetching, top_k: int
    ) -> None:
        self._table, self._clock, self._policy, self._rules = table, clock, policy, rules
        self._most_barred = len(table.owner) - 2 * top_k  # every event finds victims
        self._coming: dict[int, Copy] = {}  # by expert, without those that nobody waits for
        self._promised: dict[int, list[int]] = {}  # by event: slots that are kept for it
        self._fresh: dict[int, int] = {}  # landed, not wanted since; when it was asked for
        self._token = 0
        self._budget = 0

    def start_token(self, token: int) -> None:
        self._token, self._budget = token, self._rules.budget

    def land(self) -> None:
        """Take note of the copies that have landed by now."""
        for copy in self._clock.landed:
            if copy.dropped:
                self._table.vacate(np.array([copy.slot]))
            else:
                self._table.slot_of[copy.expert] = copy.slot
                self._fresh[copy.expert] = copy.token
                del self._coming[copy.expert]
        self._clock.landed.clear()

    def barred(self) -> Ints:
        """Slots that must not become victims."""
        if not self._clock.copies and not self._promised:
            return _NONE
        slots = [copy.slot for copy in self._clock.copies]
        for promised in self._promised.values():
            slots += promised
        return np.array(slots, np.int64)

    def late(self, wanted: Ints) -> list[int]:
        """Those of the wanted whose copies are under way and here sooner than a fetch would be. Of
        the others that are under way, the copies are dropped."""
        waiting: list[int] = []
        for expert in wanted.tolist() if self._coming else ():
            copy = self._coming.get(expert)
            if copy and self._clock.lands_at(copy) - self._clock.now < self._clock.link.fetch_s:
                waiting.append(expert)
            elif copy:
                copy.dropped = True
                del self._coming[expert]
        return waiting

    def wait(self, experts: Sequence[int]) -> None:
        """Time goes by until all of them have landed."""
        for expert in experts:
            if expert in self._coming:
                self._clock.run(self._clock.lands_at(self._coming[expert]))
                self.land()

    def passed(self, event: int, wanted: Ints, waiting: Sequence[int], loads: Ints) -> list[int]:
        """The event has its experts: for each hit because of a prefetch in time, the token in which
        that was asked for."""
        self._promised.pop(event, None)
        late = {*waiting, *loads.tolist()}  # or landed, but evicted before this
        tokens = [(e, self._fresh.pop(e)) for e in wanted.tolist() if e in self._fresh]
        return [token for expert, token in tokens if expert not in late]

    def request(self, event: int, wanted: Ints) -> int:
        """Ask for what is worth it behind an event that wanted these experts; returns the number of
        copies."""
        if self._rules.source is None or event % self._rules.every:
            return 0
        self.land()
        room = min(self._rules.in_flight - len(self._clock.copies), self._budget)
        if room <= 0:
            return 0
        absent = self._table.slot_of < 0
        absent[[copy.expert for copy in self._clock.copies]] = False
        experts, probability, due = self._rules.source.candidates(event, absent)
        link, now = self._clock.link, self._clock.now
        ready = now + max(link.delay_s, self._clock.backlog_s())
        units = np.floor(
            (now + (due - event) * link.layer_s - ready + self._rules.slack * link.fetch_s)
            / link.copy_s
            + 1e-9
        )
        able = np.flatnonzero((units >= 1) & (probability >= round(self._rules.least * ONE)))
        order = schedule(probability[able], units[able].astype(np.int64), self._budget)
        room = min(room, self._most_barred - len(self.barred()))
        for job in able[order[: max(room, 0)]].tolist():
            self._start(int(experts[job]), int(due[job]), wanted)
        return min(len(order), max(room, 0))

    def _start(self, expert: int, due: int, wanted: Ints) -> None:
        barred = np.concatenate((self.barred(), self._table.slot_of[wanted]))
        slot = self._policy.victims(self._table.owner, barred, np.array([expert]))
        self._table.vacate(slot)
        self._table.owner[slot] = expert
        copy = Copy(expert, int(slot[0]), self._token)
        self._clock.request(copy)
        self._coming[expert] = copy
        self._promised.setdefault(due, []).append(copy.slot)
        self._budget -= 1
