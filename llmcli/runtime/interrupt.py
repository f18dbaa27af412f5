"""Ctrl-C while C code runs, and while nothing may be left half done.

Python's own SIGINT handler waits until the forward pass returns, which for a long prompt is
seconds, and then raises between any two lines. The interpreter writes to a wake-up descriptor at
once, though; a thread waits there and calls back. What ends a program as Ctrl-C would (a terminal
that is gone) stops an answer, too.
"""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = {
    number for name in ("SIGINT", "SIGHUP", "SIGTERM") if (number := getattr(signal, name, None))
}

_waiting: list[int] = []  # a Ctrl-C that nobody has acted on; signals are the whole process's


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` (from another thread) for every SIGINT inside the block, instead of
    KeyboardInterrupt.

    One that had to wait for the block counts. Outside the main thread, where Python allows no
    handlers, the block runs unchanged.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while number := reader.recv(1):  # every signal that Python handles is told here
            if number[0] in STOPS:
                act()

    thread = threading.Thread(target=listen, name="interrupt", daemon=True)
    thread.start()
    old_handler = signal.signal(signal.SIGINT, _wait)
    old_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        if _waiting:
            act()
        yield
    finally:
        signal.set_wakeup_fd(old_descriptor)
        signal.signal(signal.SIGINT, old_handler)
        _waiting.clear()
        writer.close()  # the thread reads the end and leaves
        thread.join()
        reader.close()


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C wait for the next `on_interrupt` or `interrupts_raise` inside the block, or for
    the block's end.

    There it is KeyboardInterrupt again. Nothing in between is left half done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _waiting.clear()
    before = signal.signal(signal.SIGINT, _wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupt_taken():
        raise KeyboardInterrupt


def interrupt_taken() -> bool:
    """Whether a Ctrl-C waits; it waits no longer."""
    came = bool(_waiting)
    _waiting.clear()
    return came


@contextmanager
def interrupts_raise() -> Iterator[None]:
    """Where Ctrl-C waits: let it be KeyboardInterrupt in this block, which can be left anywhere."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not _wait
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if interrupt_taken():
            raise KeyboardInterrupt
        yield
    finally:
        signal.signal(signal.SIGINT, _wait)


def _wait(number: int, frame: FrameType | None) -> None:
    _waiting.append(number)
