"""Ctrl-C while C code runs.

Python's own SIGINT handler waits until the forward pass returns, which for a long prompt is seconds.
The interpreter writes to a wake-up descriptor at once, though; a thread waits there and calls back.
"""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` (from another thread) for every SIGINT inside the block, instead of KeyboardInterrupt.

    Outside the main thread, where Python allows no handlers, the block runs unchanged.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while number := reader.recv(1):  # every signal that Python handles is told here
            if number == bytes([signal.SIGINT]):
                act()

    thread = threading.Thread(target=listen, name="interrupt", daemon=True)
    thread.start()
    old_handler = signal.signal(signal.SIGINT, lambda *_: None)
    old_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_descriptor)
        signal.signal(signal.SIGINT, old_handler)
        writer.close()  # the thread reads the end and leaves
        thread.join()
        reader.close()
