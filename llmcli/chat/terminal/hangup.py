"""Handles SIGHUP (the terminal was closed) and SIGTERM: the current answer stops as after Ctrl-C,
so that its text is still added to the conversation and the log.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HANGUP_SIGNAL = getattr(signal, "SIGHUP", None)  # does not exist on Windows
END_SIGNALS = tuple(number for number in (HANGUP_SIGNAL, signal.SIGTERM) if number is not None)


@contextmanager
def handle_hangup(on_hangup: Callable[[], None]) -> Iterator[list[int]]:
    """While the with block runs, call `on_hangup` when SIGHUP or SIGTERM arrives, and then
    interrupt the program as Ctrl-C does. Yield a list to which the numbers of these signals are
    added.

    A signal that is ignored, as under nohup, stays ignored. After SIGHUP all output is discarded,
    because the terminal is closed.
    """
    signals: list[int] = []

    def handle_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        on_hangup()
        if number == HANGUP_SIGNAL:
            discard_output()
        signal.raise_signal(signal.SIGINT)

    previous_handlers = {number: signal.getsignal(number) for number in END_SIGNALS}
    for number, handler in previous_handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, handle_signal)
    try:
        yield signals
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@contextmanager
def exit_on_hangup() -> Iterator[None]:
    """While the with block runs, SIGHUP and SIGTERM interrupt it as Ctrl-C does. Raise SystemExit
    with 128 + the signal's number after the block, as shells do. Outside the main thread nothing is
    changed, because Python allows signal handlers only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handle_hangup(lambda: None) as signals:
        try:
            yield
        finally:
            if signals:
                raise SystemExit(128 + signals[0])


def discard_output() -> None:
    """Redirect stdout and stderr to the null device, because writing to a closed terminal fails."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null_device, stream)
    os.close(null_device)
