"""TokenRing: how chosen tokens reach the host while the device goes on."""

from __future__ import annotations

import time

import torch

from seqmoe_kernels import ENTRY_WORDS, PoolState, publish, read_entry

_SIZE = 64  # entries; far more than steps that run ahead of the host
_NAP_S = 20e-6  # between looks; a sleeping thread leaves the interpreter to others


class TokenRing:
    """Entries in host memory that the device writes, numbered without end.

    `next_number` is the number of the next entry that will be asked of the device. An entry that
    nobody takes is overwritten one day.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._entries = torch.full((_SIZE, ENTRY_WORDS), -1, dtype=torch.int64, pin_memory=on_gpu)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        self.next_number = 0

    def begin(self) -> None:
        """Let the device count from `next_number`, whatever became of the steps before."""
        self._number.fill_(self.next_number)

    def put(self, token: torch.Tensor, pool: PoolState) -> None:
        """Queue the writing of one entry: `token` int64 [1] and the pool's counters."""
        publish(token, pool, self._entries, self._number)

    def wait(self, number: int) -> tuple[int, list[int]]:
        """An entry that has been asked for: the token, and the numbers of `PoolState.counters`.
        Other threads run meanwhile."""
        while True:
            idle = self._stream is None or self._stream.query()  # also raises the device's errors
            if (entry := read_entry(self._entries, number)) is not None:
                token, *counters = entry
                return token, counters
            if idle:
                raise AssertionError(f"the device is idle and has not written entry {number}")
            time.sleep(_NAP_S)
