"""The thread that writes entries of the prefix cache. The queue before it is bounded in bytes by its
user, who asks for `nbytes`.

An error of the operating system pauses the writing. An unexpected exception, a bug, ends it for
good and is reported with its traceback: what the folder then has may be wrong.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from llmcli.errors import UserError
from llmcli.runtime.disk_cache.entry import Entry
from llmcli.runtime.disk_cache.folder import QuotaTooSmall, StateFolder
from llmcli.runtime.state_file_format import Bytes
from llmcli.units import format_size

PAUSE_SECONDS = 30.0  # after an error, nothing is written for this time


@dataclass(frozen=True, slots=True)
class WriteJob:
    """An entry to be written, with the tokens and the state of the file."""

    entry: Entry
    tokens: Sequence[int]
    state: Bytes


class StateWriter:
    """Writes entries to `folder`, one after another. `on_written`: called on the writer's thread
    after each job, with the entry and whether it is in the folder. `report`: called once with each
    reason why nothing is written.
    """

    def __init__(
        self,
        folder: StateFolder,
        on_written: Callable[[Entry, bool], None],
        report: Callable[[str], None],
    ) -> None:
        self.folder, self._on_written, self._report = folder, on_written, report
        self.nbytes = self.written_bytes = self.n_written = self.n_failed = self.n_bugs = 0
        self._is_broken = False
        self._reported: set[str] = set()
        self._paused_until = 0.0
        self._pause_topics: set[str] = set()  # why the last writes failed
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="llmcli-states", daemon=True)
        self._thread.start()

    @property
    def is_paused(self) -> bool:
        """Return whether nothing is written: the folder could not be written a short time ago, or a
        bug has ended the writing.
        """
        return self._is_broken or time.monotonic() < self._paused_until

    def enqueue(self, job: WriteJob) -> None:
        """Queue an entry. The call does not wait."""
        with self._lock:
            self.nbytes += len(job.state)
        self._queue.put(lambda: self._write(job))

    def touch(self, names: Sequence[str]) -> None:
        """Queue that entries were used."""
        self._queue.put(lambda: self.folder.touch(names))

    def close(self, seconds: float) -> None:
        """Write what is queued, for at most `seconds`, and end the thread."""
        self._queue.put(None)
        self._thread.join(seconds)

    def pause(self, reason: str) -> None:
        """Write nothing for a while, and report the reason unless it was reported since the last
        successful write, also for another file.
        """
        self._paused_until = time.monotonic() + PAUSE_SECONDS
        topic = reason.rpartition(": ")[2]
        self._pause_topics.add(topic)
        self.report_once(f"{reason}; states of answers are not saved until this works again", topic)

    def report_once(self, text: str, topic: str = "") -> None:
        """Report a text, unless one on the same topic was reported. The default topic is the text."""
        if (topic or text) not in self._reported:
            self._reported.add(topic or text)
            self._report(text)

    def report_bug(self, error: BaseException, consequence: str) -> None:
        """Count an unexpected exception, and report it with its traceback, unless an equal one was
        reported. `consequence`: what the cache does not do because of it.
        """
        with self._lock:
            self.n_bugs += 1
        trace = "".join(traceback.format_exception(error)).rstrip()
        self.report_once(
            f"a bug in the prefix cache on disk: {consequence}\n{trace}",
            f"bug: {type(error).__name__}: {error}",
        )

    def _run(self) -> None:
        while (action := self._queue.get()) is not None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 (it is reported; later states are counted as failed)
                self._is_broken = True
                self.report_bug(error, "states are not saved any more until the next start")

    def _write(self, job: WriteJob) -> None:
        is_written = False
        try:
            if not self.is_paused:
                is_written = self.folder.write(job.entry, job.tokens, job.state)
            if is_written:  # the next failure is news again
                self._reported -= self._pause_topics
                self._pause_topics.clear()
        except QuotaTooSmall:
            self.report_once(
                f"a state of {format_size(len(job.state))} is not saved: --cache-dir-size allows"
                f" {format_size(self.folder.max_bytes)} for all"
            )
        except (UserError, OSError, MemoryError) as error:
            self.pause(str(error))
        finally:
            with self._lock:
                self.nbytes -= len(job.state)
                self.n_written += is_written
                self.n_failed += not is_written
                self.written_bytes += len(job.state) if is_written else 0
            self._on_written(job.entry, is_written)
