"""Beside: work that runs next to that of the caller's stream, within a CUDA graph as well."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Beside:
    """On a GPU a stream of its own; on a CPU the work is done at once.

    What is in the works may use nothing that the caller's stream changes between `fork` and `join`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fork(self, work: Callable[[], None]) -> None:
        """Queue `work` behind what the caller has queued."""
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """What the caller queues from now on waits for the work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
