"""The terminal is gone, or the process was told to end: the answer stops as at Ctrl-C, what was
said is kept.

It knows signals, not what is being said.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

GONE = getattr(signal, "SIGHUP", None)  # Windows has none
ENDS = tuple(number for number in (GONE, signal.SIGTERM) if number is not None)


@contextmanager
def on_hangup(leave: Callable[[], None]) -> Iterator[list[int]]:
    """Call `leave` for SIGHUP and SIGTERM inside the block, then do as Ctrl-C does; the list holds
    what came.

    A signal that is ignored (nohup) stays so. What is still written to a terminal that is gone
    falls.
    """
    came: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        came.append(number)
        leave()
        if number == GONE:
            silence()
        signal.raise_signal(signal.SIGINT)  # whoever is at work knows what to do then

    before = {number: signal.getsignal(number) for number in ENDS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def silence() -> None:
    """Let all that is written from here on fall: nobody reads it, and a terminal that is gone
    refuses it.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
