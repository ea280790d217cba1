"""Flight: the prefetches of a replay, from request to landing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqmoe_cli.residency.policies import ONE, Ints
from tools.simulator.link import Copy, LinkClock
from tools.simulator.prefetch import CandidateSource
from tools.simulator.scores import Policy
from tools.simulator.slot_table import SlotTable

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class PrefetchRules:
    """When prefetches are requested. `source` None: never. At most `in_flight` copies are under way
    and at most `budget` are requested in a token, behind the events whose number `every` divides. A
    candidate less probable than `least` is left alone."""

    source: CandidateSource | None = None
    in_flight: int = 2
    budget: int = 64
    least: float = 0.25
    every: int = 1


class Flight:
    """The prefetches under way. A slot with a copy under way is not in the lookup table, and no
    victim. A slot with a landed copy is no victim until the event that it is for has passed."""

    def __init__(
        self, table: SlotTable, clock: LinkClock, policy: Policy, rules: PrefetchRules, top_k: int
    ) -> None:
        self._table, self._clock, self._policy, self._rules = table, clock, policy, rules
        self._most_barred = len(table.owner) - 2 * top_k  # every event finds victims
        self._coming: dict[int, Copy] = {}  # by expert; dropped copies are not in it
        self._promised: dict[int, list[int]] = {}  # by event: slots that are kept for it
        self._fresh: dict[int, int] = {}  # landed, not wanted yet: the token of its request
        self._token = 0
        self._budget = 0

    def start_token(self, token: int) -> None:
        self._token, self._budget = token, self._rules.budget

    def land(self) -> None:
        """Put the copies that have landed by now into the lookup table."""
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

    def late(self, wanted: Ints) -> list[Copy]:
        """The copies of wanted experts that are under way and land sooner than a fetch would. Other
        copies of wanted experts are dropped."""
        waiting: list[Copy] = []
        for expert in wanted.tolist() if self._coming else ():
            copy = self._coming.get(expert)
            if copy and self._clock.is_sooner(copy):
                waiting.append(copy)
            elif copy:
                copy.dropped = True
                del self._coming[expert]
        return waiting

    def passed(self, event: int, wanted: Ints, missed: Ints) -> list[int]:
        """The event has its experts. Returns, for each hit that a prefetch made in time, the token
        in which that prefetch was requested. `missed`: wanted experts fetched or waited for."""
        self._promised.pop(event, None)
        late = set(missed.tolist())  # or landed, but evicted before this
        tokens = [(e, self._fresh.pop(e)) for e in wanted.tolist() if e in self._fresh]
        return [token for expert, token in tokens if expert not in late]

    def cut(self, event: int) -> list[Copy]:
        """Behind an event: end the copies for it that were not wanted, if that can be done. Their
        slots are empty at once."""
        ended = self._clock.cut(event)
        for copy in ended:
            self._table.vacate(np.array([copy.slot]))
            del self._coming[copy.expert]
        return ended

    def request(self, event: int, wanted: Ints) -> int:
        """Behind an event that wanted these experts: request the copies that are worth it. Returns
        their number."""
        if self._rules.source is None or event % self._rules.every:
            return 0
        self.land()
        room = min(self._rules.in_flight - len(self._clock.copies), self._budget)
        if room <= 0:
            return 0
        absent = self._table.slot_of < 0
        absent[[copy.expert for copy in self._clock.copies]] = False
        experts, probability, due = self._rules.source.candidates(event, absent)
        able = np.flatnonzero(probability >= round(self._rules.least * ONE))
        seconds = (due[able] - event) * self._clock.link.layer_s
        order = able[self._clock.order(probability[able], seconds, self._budget)]
        room = min(room, self._most_barred - len(self.barred()))
        chosen = order[: max(room, 0)].tolist()
        for job in chosen:
            self._start(int(experts[job]), int(due[job]), wanted)
        return len(chosen)

    def _start(self, expert: int, due: int, wanted: Ints) -> None:
        barred = np.concatenate((self.barred(), self._table.slot_of[wanted]))
        slot = self._policy.victims(self._table.owner, barred, np.array([expert]))
        self._table.vacate(slot)
        self._table.owner[slot] = expert
        copy = Copy(expert, int(slot[0]), self._token, due)
        self._clock.request(copy)
        self._coming[expert] = copy
        self._promised.setdefault(due, []).append(copy.slot)
        self._budget -= 1
