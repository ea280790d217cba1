"""Ctrl-C as a flag that is polled, so that nothing is torn apart half way."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interrupts:
    """While it is entered, SIGINT only sets a flag; `clear` forgets it."""

    def __init__(self) -> None:
        self._pressed = False

    def __enter__(self) -> Interrupts:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def pressed(self) -> bool:
        return self._pressed

    def clear(self) -> None:
        self._pressed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True
