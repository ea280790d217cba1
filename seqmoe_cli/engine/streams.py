"""Beside: work that runs next to that of the caller's stream, within a CUDA graph as well."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Beside:
    """On a GPU a stream of its own; on a CPU the work is done at once.

    What is in the works may use nothing that the caller's stream changes between `fork` and `join`.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        """Work that waits for kernels which the caller queues later needs a `priority` of its own,
        -1 or lower: those of the same one may come to share a queue of the device, in which the
        kernels would stand behind it."""
        self._stream: torch.cuda.Stream | None = None
        self._is_out = False
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]

    def fork(self, work: Callable[[], None]) -> None:
        """Queue `work` behind what the caller has queued."""
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        self._is_out = True

    def join(self) -> None:
        """What the caller queues from now on waits for the work, if there is any."""
        if self._stream is not None and self._is_out:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._is_out = False
