"""Ctrl-C during passes that are lost with it: measuring, evaluating, calibrating."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from llmcli.runtime.binding.context import Aborted
from llmcli.runtime.interrupt import on_interrupt

AGAIN = 0.05  # seconds between requests to end


class Interruptible(Protocol):
    """A context whose running pass can be ended from another thread."""

    def interrupt(self) -> None: ...


@contextmanager
def stopped(context: Interruptible) -> Iterator[None]:
    """Let Ctrl-C end the running pass and be KeyboardInterrupt.

    A pass that is nearly through when it is asked to end does not notice: the next is asked, and
    where there is none the end of the block raises.
    """
    came, left = threading.Event(), threading.Event()

    def stop() -> None:
        came.set()
        context.interrupt()
        while not left.wait(AGAIN):
            context.interrupt()

    with on_interrupt(stop):
        try:
            yield
        except Aborted:
            raise KeyboardInterrupt from None
        finally:
            left.set()
    if came.is_set():
        raise KeyboardInterrupt
