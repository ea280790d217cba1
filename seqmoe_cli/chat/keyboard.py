"""The keyboard while the program is busy: Ctrl-C as a flag that is polled, so that nothing is torn
apart half way, and typing that waits for the next prompt."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator


class Interrupts:
    """Whether Ctrl-C was pressed since the last `clear`."""

    def __init__(self) -> None:
        self._pressed = False

    def pressed(self) -> bool:
        return self._pressed

    def set(self, number: int = 0, frame: object = None) -> None:
        self._pressed = True

    def clear(self) -> None:
        self._pressed = False


@contextlib.contextmanager
def polled_interrupts() -> Iterator[Interrupts]:
    """Inside, SIGINT does nothing but set a flag."""
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, interrupts.set)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


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
