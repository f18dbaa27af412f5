"""Stop a forward pass at Ctrl-C and discard its result, as in measuring, evaluating and
calibrating. (Answers use interrupt.py directly, because they keep their text so far.)
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from llmcli.runtime.binding.contexts.context import Aborted
from llmcli.runtime.interrupt import on_interrupt

RETRY_SECONDS = 0.05  # seconds before the request to stop is repeated


class Interruptible(Protocol):
    """A llama.cpp context whose running pass can be stopped from another thread."""

    def interrupt(self) -> None: ...


@contextmanager
def interruptible(context: Interruptible) -> Iterator[None]:
    """Make Ctrl-C stop the passes of the `with` block and raise KeyboardInterrupt.

    A pass that is almost complete ignores a request to stop. So the request is repeated until a
    pass stops or the block ends.
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
