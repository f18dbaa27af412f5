"""Ctrl-C while C code runs, and around work that must not be left half done.

Python's own SIGINT handler waits until the forward pass returns, which takes seconds for a long
prompt, and then raises KeyboardInterrupt between any two lines. However, the interpreter writes to
a wake-up descriptor as soon as a signal arrives; a thread waits for this and calls a function.
Other signals that end a program (such as that of a closed terminal) stop an answer, too.
"""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = {
    number for name in ("SIGINT", "SIGHUP", "SIGTERM") if (number := getattr(signal, name, None))
}

# deferred signals that were not handled yet; global, because signals belong to the whole process
_waiting: list[int] = []


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` from another thread for every Ctrl-C or other signal that ends a program, as long
    as the block runs. Ctrl-C then raises no KeyboardInterrupt.

    If `defer_interrupts` deferred a Ctrl-C before the block, `act` is called at the start of the
    block. Outside the main thread, where Python allows no signal handlers, the block runs
    unchanged.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while number := reader.recv(1):  # receives every signal that Python handles
            if number[0] in STOP_SIGNALS:
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
        writer.close()  # the thread reads the end of the stream and stops
        thread.join()
        reader.close()


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer a Ctrl-C inside the block. It takes effect in the next `on_interrupt` or
    `allow_interrupts` inside the block, or else at the end of the block, which then raises
    KeyboardInterrupt. All other code of the block is not interrupted.
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
    if pop_interrupt():
        raise KeyboardInterrupt


def pop_interrupt() -> bool:
    """Return whether a deferred Ctrl-C waits to be handled, and forget it."""
    deferred = bool(_waiting)
    _waiting.clear()
    return deferred


@contextmanager
def allow_interrupts() -> Iterator[None]:
    """Inside `defer_interrupts`, let Ctrl-C raise KeyboardInterrupt at any line of this block."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not _wait
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if pop_interrupt():
            raise KeyboardInterrupt
        yield
    finally:
        signal.signal(signal.SIGINT, _wait)


def _wait(number: int, frame: FrameType | None) -> None:
    _waiting.append(number)
