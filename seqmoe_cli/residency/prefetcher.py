"""Prefetcher: one host thread that copies the records that the device asks for, beside its kernels.

The device waits for it only within bounds, and goes by the tag that lands behind a record. So the
thread may be slow, refuse, or die: what it does not bring is a miss.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Protocol

import torch

from seqmoe_cli.residency.driver import Driver
from seqmoe_kernels import Flights, PoolState, Request, read_request
from seqmoe_kernels.state import NUM_REQUESTS

MAX_UNDER_WAY = 2  # more would only slow down the fetches beside them
NAP_S = 5e-6  # between looks; a sleeping thread leaves the interpreter to others
_SET_TIMER_SLACK = 29  # prctl: how much longer than asked for a thread may sleep, else 50 us
_STUCK_S = 10.0  # of a copy, that takes a hundred thousandth of it
_GOODBYE_S = 5.0  # a thread that hangs in a copy is not waited for any longer
_IDLE_NAP_S = 500e-6
_IDLE_AFTER = 2000  # looks in vain


class Copier(Protocol):
    """Moves records into slots. Copies land in the order in which they were started."""

    def begin(self) -> None:
        """Called in the thread, before its first copy."""

    def start(self, request: Request, refuse: bool) -> None:
        """Copy the record and land the tag behind it; or land minus the tag and copy nothing."""

    def num_under_way(self) -> int:
        """How many of those that were started have not landed."""


class HostCopier:
    """Slots in host memory: the thread itself copies, which leaves the interpreter to others."""

    def __init__(self, records: torch.Tensor, slots: torch.Tensor, pool: PoolState) -> None:
        self._records, self._slots = records, slots
        self._landed = pool.landed_tag.numpy()
        self._fence = threading.Lock()

    def begin(self) -> None:
        """Nothing is bound to a thread here."""

    def start(self, request: Request, refuse: bool) -> None:
        if not refuse:
            self._slots[request.slot].copy_(self._records[request.expert])
        # The tag must not be seen before the record. Stores before the release of a lock stay
        # before it, those behind the next acquisition behind it.
        with self._fence:
            pass
        with self._fence:
            self._landed[request.slot] = -request.tag if refuse else request.tag

    def num_under_way(self) -> int:
        return 0


class DmaCopier:
    """Slots on a GPU: the copy engine moves the record, then the tag, on a stream of their own."""

    def __init__(self, records: torch.Tensor, slots: torch.Tensor, pool: PoolState) -> None:
        """Tensors are kept: copies are made between their addresses."""
        self._records, self._slots, self._landed = records, slots, pool.landed_tag
        self._tags = torch.zeros(NUM_REQUESTS, dtype=torch.int64, pin_memory=True)
        self._tag_values = self._tags.numpy()
        self._record_bytes = slots.shape[1]
        self._stream = torch.cuda.Stream(slots.device)  # type: ignore[no-untyped-call]
        self._driver = Driver()
        self._events = deque(_new_event() for _ in range(MAX_UNDER_WAY))
        self._under_way: deque[torch.cuda.Event] = deque()
        self._next = 0

    def begin(self) -> None:
        torch.cuda.set_device(self._slots.device)
        self._driver.enter()

    def start(self, request: Request, refuse: bool) -> None:
        tag, slot, expert, _ = request
        copy, size = self._driver.copy_to_device, self._record_bytes
        stream = self._stream.cuda_stream
        if not refuse:
            record = self._records.data_ptr() + expert * size
            copy(self._slots.data_ptr() + slot * size, record, size, stream)
        place = self._next % len(self._tag_values)  # long free: few copies are under way
        self._next += 1
        self._tag_values[place] = -tag if refuse else tag
        copy(self._landed.data_ptr() + slot * 8, self._tags.data_ptr() + place * 8, 8, stream)
        event = self._events.popleft() if self._events else _new_event()
        event.record(self._stream)
        self._under_way.append(event)

    def num_under_way(self) -> int:
        while self._under_way and self._under_way[0].query():  # type: ignore[no-untyped-call]
            self._events.append(self._under_way.popleft())
        return len(self._under_way)


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _sleep_exactly() -> None:
    """Let short naps of this thread be short, where the system can: a request waits for them."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, ctypes.c_ulong(1), 0, 0, 0)


class Prefetcher:
    """`died` says why the thread has, None while it has not."""

    def __init__(self, flights: Flights, copier: Copier) -> None:
        self.died: str | None = None
        self._moved_at = time.perf_counter()  # when a copy ended last, or none was under way
        self._num_under_way = 0
        self.num_copied = 0
        self._requests, self._control = flights.requests, flights.control.numpy()
        self._copier = copier
        self._next_number = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetcher", daemon=True)

    @property
    def failure(self) -> str | None:
        """Why no copies come, None while they do."""
        waited = time.perf_counter() - self._moved_at
        stuck = f"no copy has ended for {waited:.0f} s" if waited > _STUCK_S else None
        return self.died or stuck

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; copies that it has started may still be under way."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_GOODBYE_S)

    def _run(self) -> None:
        looks = 0
        try:
            with torch.inference_mode():
                _sleep_exactly()
                self._copier.begin()
                while not self._stopping.is_set():
                    if self._serve():
                        looks = 0
                    else:
                        looks += 1
                        time.sleep(NAP_S if looks < _IDLE_AFTER else _IDLE_NAP_S)
        except BaseException as error:
            self.died = f"{type(error).__name__}: {error}"

    def _serve(self) -> bool:
        """Start the next copy if there is one, and the link is free for it."""
        before, self._num_under_way = self._num_under_way, self._copier.num_under_way()
        if self._num_under_way == 0 or self._num_under_way < before:
            self._moved_at = time.perf_counter()
        if self._num_under_way >= MAX_UNDER_WAY:
            return False
        clock, misses_are_served = divmod(int(self._control[0]), 2)
        if misses_are_served:
            return False
        request = read_request(self._requests, self._next_number)
        if request is None:
            return False
        self._next_number += 1
        too_late = request.event <= clock  # its event is over: the link has better things to do
        self._copier.start(request, too_late)
        self.num_copied += not too_late
        return True
