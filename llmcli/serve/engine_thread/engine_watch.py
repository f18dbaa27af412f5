"""Notices when the engine's thread is stuck: when it works on one pass or function for longer than
the limit of the watchdog (runtime/engine/watchdog.py).
"""

import time

from llmcli.errors import UserError
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.engine.watchdog import WatchedWork, limit_seconds


class EngineStuck(UserError):
    """Raised when the engine's thread is stuck. Only a restart of the process helps."""


class EngineWatch:
    """Records what the engine's thread is doing. The thread calls `begin` and `end`, and any other
    thread `check`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._busy_since: float | None = None
        self._max_rows = 0

    def begin(self, max_rows: int = 0) -> None:
        """Record that the thread begins a step of the engine, or a function that computes passes of
        at most `max_rows` rows.
        """
        self._busy_since = time.monotonic()
        # after the time, because check reads the rows first: those of an earlier pass must not be
        # missing beside its time
        self._engine.pass_rows, self._max_rows = 0, max_rows

    def end(self) -> None:
        """Record that the thread is done, and waits for work."""
        self._busy_since = None

    def check(self) -> None:
        """Raise EngineStuck if the thread has exceeded its limit."""
        engine = self._engine
        rows = max(engine.pass_rows, self._max_rows)
        busy_since = self._busy_since
        if busy_since is None:
            return
        limit = limit_seconds(WatchedWork(rows, engine.scheduler.prefill.row_seconds))
        seconds = time.monotonic() - busy_since
        if seconds > limit:
            raise EngineStuck(
                f"the engine has been working on {rows or 'no'} rows for {seconds:.0f} s;"
                f" {limit:.0f} s are expected at most",
                hint="the process of the model must be restarted",
            )
