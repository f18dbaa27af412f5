"""Ctrl-C during passes whose result is discarded: measuring, evaluating, calibrating."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from llmcli.runtime.binding.context import Aborted
from llmcli.runtime.interrupt import on_interrupt

RETRY_SECONDS = 0.05  # seconds before the request to stop is repeated


class Interruptible(Protocol):
    """A context whose running pass can be stopped from another thread."""

    def interrupt(self) -> None: ...


@contextmanager
def interruptible(context: Interruptible) -> Iterator[None]:
    """Let Ctrl-C stop the running pass and raise KeyboardInterrupt.

    A pass that is almost complete does not see the request to stop. The request is therefore
    repeated until a pass stops or the block ends, and then KeyboardInterrupt is raised.
    """
    interrupted, finished = threading.Event(), threading.Event()

    def stop() -> None:
        interrupted.set()
        context.interrupt()
        while not finished.wait(RETRY_SECONDS):
            context.interrupt()

    with on_interrupt(stop):
        try:
            yield
        except Aborted:
            raise KeyboardInterrupt from None
        finally:
            finished.set()
    if interrupted.is_set():
        raise KeyboardInterrupt
