"""Handle Ctrl-C: stop C code at once, or defer the KeyboardInterrupt while work must not be
interrupted.

Python runs its own SIGINT handler only when the C code of a forward pass has returned, which may
take seconds, and then raises KeyboardInterrupt at an arbitrary line. But it writes to the wake-up
descriptor as soon as a signal arrives. A thread here reads this descriptor and calls a function.
Other signals that end a program, such as that of a closed terminal, are handled in the same way.
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

# The signal of the key that ends the thinking of an answer (chat/terminal/thinking_key.py); None on
# Windows.
THINKING_SIGNAL: int | None = getattr(signal, "SIGQUIT", None)

# Numbers of deferred signals that are not handled yet. A global, because signals belong to the
# process.
_deferred_signals: list[int] = []


@contextmanager
def on_interrupt(
    action: Callable[[], None], end_thinking: Callable[[], None] | None = None
) -> Iterator[None]:
    """While the `with` block runs, call `action` for every Ctrl-C and every other signal in
    STOP_SIGNALS. The call comes from another thread. Ctrl-C raises no KeyboardInterrupt.
    `end_thinking`: called for THINKING_SIGNAL, if the program handles it.

    If `defer_interrupts` deferred a Ctrl-C before the block, `action` is called at the start of the
    block. Outside the main thread nothing is changed, because Python allows signal handlers only
    in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while number := reader.recv(1):  # a byte with the number of any signal that Python handles
            if number[0] in STOP_SIGNALS:
                action()
            elif number[0] == THINKING_SIGNAL and end_thinking:
                end_thinking()

    thread = threading.Thread(target=listen, name="interrupt", daemon=True)
    thread.start()
    old_handler = signal.signal(signal.SIGINT, _defer)
    old_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        if _deferred_signals:
            action()
        yield
    finally:
        signal.set_wakeup_fd(old_descriptor)
        signal.signal(signal.SIGINT, old_handler)
        _deferred_signals.clear()
        writer.close()  # the thread reads the end of the stream and stops
        thread.join()
        reader.close()


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer a Ctrl-C while the `with` block runs, so that its code is not interrupted.

    A deferred Ctrl-C takes effect at the next `on_interrupt` or `allow_interrupts` inside the
    block. Without one, KeyboardInterrupt is raised at the end of the block. Outside the main thread
    nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _deferred_signals.clear()
    old_handler = signal.signal(signal.SIGINT, _defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old_handler)
    if pop_interrupt():
        raise KeyboardInterrupt


def pop_interrupt() -> bool:
    """Return whether a Ctrl-C was deferred and not yet handled. The caller handles it: a second
    call returns False.
    """
    is_deferred = bool(_deferred_signals)
    _deferred_signals.clear()
    return is_deferred


@contextmanager
def allow_interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt while the `with` block runs, inside a block of
    `defer_interrupts`. A Ctrl-C that was deferred before raises it at once.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not _defer
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if pop_interrupt():
            raise KeyboardInterrupt
        yield
    finally:
        signal.signal(signal.SIGINT, _defer)


def _defer(number: int, frame: FrameType | None) -> None:
    """Record the signal `number` instead of handling it (a signal handler)."""
    _deferred_signals.append(number)
