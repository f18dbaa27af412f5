"""What a server tells its operator while it runs, on standard error: facts that are told once, and a
line for each prompt that the cache could have helped more.

The lines are written on a thread of their own, because the reader of standard error may be slow. If
too many lines wait, further ones are counted and left out.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

MAX_WAITING_LINES = 256
LOGGER = logging.getLogger("llmcli.serve.notes")


class ServerLog:
    """The log of one server. Any thread may call its methods."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._lock = Lock()
        self._n_waiting = self._n_left_out = 0
        self._writer = ThreadPoolExecutor(1, "llmcli-log")

    def tell_once(self, *facts: str) -> None:
        """Write each fact that was not written before."""
        for fact in facts:
            with self._lock:
                is_new = fact not in self._told
                self._told.add(fact)
            if is_new:
                self.write(fact)

    def write(self, line: str) -> None:
        """Write a line."""
        with self._lock:
            if self._n_waiting == MAX_WAITING_LINES:
                self._n_left_out += 1
                return
            self._n_waiting += 1
        self._writer.submit(self._write, line)

    def close(self) -> None:
        """Write the lines that wait, and end the thread."""
        self._writer.shutdown()

    def _write(self, line: str) -> None:
        LOGGER.warning("%s", line)
        with self._lock:
            self._n_waiting -= 1
            n_left_out = self._n_left_out if not self._n_waiting else 0
            self._n_left_out -= n_left_out
        if n_left_out:
            LOGGER.warning("%d further lines were left out", n_left_out)
