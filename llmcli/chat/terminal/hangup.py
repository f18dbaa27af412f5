"""SIGHUP and SIGTERM: the answer stops as at Ctrl-C, and its text is kept."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HANGUP_SIGNAL = getattr(signal, "SIGHUP", None)  # Windows has none
END_SIGNALS = tuple(number for number in (HANGUP_SIGNAL, signal.SIGTERM) if number is not None)


@contextmanager
def handle_hangup(leave: Callable[[], None]) -> Iterator[list[int]]:
    """Inside the block, call `leave` on SIGHUP and SIGTERM, then interrupt as Ctrl-C does.

    Yields a list to which the numbers of these signals are added. Ignored signals (nohup) stay
    ignored. After SIGHUP, output is discarded, because the terminal is closed.
    """
    signals: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        leave()
        if number == HANGUP_SIGNAL:
            discard_output()
        signal.raise_signal(signal.SIGINT)  # interrupts what is running as Ctrl-C does

    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def discard_output() -> None:
    """Discard all further output, because a closed terminal cannot be written to."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null_device, stream)
    os.close(null_device)
