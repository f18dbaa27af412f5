"""The log of a running server on standard error. It has facts for the operator, each of which is
written once, and a line for each prompt of which the cache had less than it could have.

The lines are written on a thread of their own, because the reader of standard error may be slow. If
too many lines wait, further ones are counted and left out.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from llmcli.serve.engine_thread.bug_log import log_bug

MAX_WAITING_LINES = 256
LOGGER = logging.getLogger("llmcli.serve.notes")


class ServerLog:
    """The log of one server. Any thread may call its methods."""

    def __init__(self) -> None:
        self._written: set[str] = set()
        self._lock = Lock()
        self._n_waiting = self._n_left_out = 0
        self._writer = ThreadPoolExecutor(1, "llmcli-log")

    def write_once(self, *facts: str) -> None:
        """Write each fact that was not written before."""
        for fact in facts:
            with self._lock:
                is_new = fact not in self._written
                self._written.add(fact)
            if is_new:
                self.write(fact)

    def write(self, line: str | Callable[[], str]) -> None:
        """Write a line, or what a function returns that is called on the log's thread."""
        with self._lock:
            if self._n_waiting == MAX_WAITING_LINES:
                self._n_left_out += 1
                return
            self._n_waiting += 1
        self._writer.submit(self._write, line)

    def close(self) -> None:
        """Write the lines that wait, and end the thread."""
        self._writer.shutdown()

    async def wait(self) -> None:
        """Wait until the lines so far are written."""
        await asyncio.get_running_loop().run_in_executor(self._writer, lambda: None)

    def _write(self, line: str | Callable[[], str]) -> None:
        try:
            LOGGER.warning("%s", line if isinstance(line, str) else line())
        except Exception as error:  # noqa: BLE001 (a line must not end the log)
            log_bug(error)
        with self._lock:
            self._n_waiting -= 1
            n_left_out = self._n_left_out if not self._n_waiting else 0
            self._n_left_out -= n_left_out
        if n_left_out:
            LOGGER.warning("%d further lines were left out", n_left_out)
