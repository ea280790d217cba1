"""The keyboard while the program is busy: Ctrl-C as a flag that is polled, so that nothing is torn
apart half way, and typing that waits for the next prompt."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def quiet_terminal() -> Iterator[None]:
    """Keys are not drawn into what is shown, and reach the next prompt as they were typed. For a
    terminal on standard input."""
    import termios

    before = termios.tcgetattr(sys.stdin)
    quiet = before[:]
    quiet[0] &= ~termios.ICRNL  # Enter stays Enter, not Ctrl-J
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
