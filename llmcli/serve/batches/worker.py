"""Answers the batches of a server, one after another, beside the requests of its clients.

The requests of a batch are background requests: they run while no request of a client waits, and
give their slots to those that do. Of embeddings, only a few texts are computed between two requests
of clients.

Every finished line is in the journal of the batch (llmcli/batch/journal.py), so that a server that is
stopped or killed goes on where it was. At the end the lines become two files: the answers, and the
errors. A second task checks new batches and closes those that were cancelled or whose time is over,
also while another batch is answered.
"""

import asyncio
import errno
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from llmcli.api.errors import BUG_TEXT, ApiError, ServerStopping, as_api_error
from llmcli.api.forms.base import Document
from llmcli.api.server_settings import ServerSettings
from llmcli.atomic_files import write_error
from llmcli.batch.input_lines import BatchInput, InputLine
from llmcli.batch.journal import BatchJournal, ForeignJournal
from llmcli.batch.request_line import parse_line
from llmcli.errors import UserError
from llmcli.serve.batches.batch_files import (
    EXPIRED,
    STORAGE_FULL,
    count_lines,
    output_lines,
    write_files,
)
from llmcli.serve.batches.file_store import FILE_MODE, FileStore, open_store
from llmcli.serve.batches.input_check import check_input
from llmcli.serve.batches.line_answers import BatchLines, LineAnswers
from llmcli.serve.batches.records import (
    OPEN_STATUSES,
    TIME_FIELDS,
    BatchProblem,
    BatchStatus,
    StoredBatch,
)
from llmcli.serve.engine_thread.bug_log import LOGGER, log_bug

T = TypeVar("T")
CLIENT = "batches"  # begins the client's id of requests of batches, for fair scheduling
RETRY_SECONDS = 30.0  # before a batch whose files could not be written is tried again
CHORE_SECONDS = 600.0  # longest time between two searches for expired files
WINDOW_LINES, WINDOW_BYTES = 32, 1 << 22  # input lines that are read at once
# errors of an input that is not there, or is a link or something else than a regular file
LOST_ERRNOS = {errno.ENOENT, errno.ELOOP, errno.EMLINK, errno.EINVAL, errno.ENXIO}
UNCHECKED: tuple[BatchStatus, ...] = ("validating",)
UNFINISHED: tuple[BatchStatus, ...] = ("in_progress",)
STORAGE_PROBLEM = BatchProblem(
    "storage_unavailable", "the server cannot write its files at present; it tries again"
)
MODEL_PROBLEM = BatchProblem(
    "model_not_served",
    "the server now runs another model; the batch goes on when its model is back",
)


class InputLost(UserError):
    """The input file of a batch is not there any more."""


class _Interrupted(Exception):
    """A function on another thread ended early, because its batch was cancelled or the server
    stops.
    """


@dataclass(slots=True)
class _RunningBatch:
    """A batch whose journal and input are open. `ending`: done when no further line is needed."""

    batch: StoredBatch
    lines: BatchLines
    journal: BatchJournal
    source: BatchInput
    n_journal_bytes: int = 0  # that are counted in the store
    is_full: bool = False  # the store has no space for more answers
    ending: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def client(self) -> str:
        """The id of the client of its requests, for fair scheduling."""
        return f"{CLIENT} {self.batch.owner}"


class BatchWorker:
    """The batches of one server. Its methods are called on the server's event loop."""

    def __init__(self, lines: LineAnswers, settings: ServerSettings) -> None:
        """`lines`: answers the lines of batches."""
        self._lines, self._settings = lines, settings
        self._store: FileStore | None = None
        self._stack, self._opening = ExitStack(), asyncio.Lock()
        self._changing = asyncio.Lock()  # statuses are changed one after another
        self._wake, self._chores = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._running: _RunningBatch | None = None  # the batch whose lines are answered
        self._busy: set[str] = set()  # ids of batches that a task works on
        self._failing: set[str] = set()  # ids of batches whose files could not be written
        self._model_hash = ""
        self._is_stopping = False
        # a journal is used by one thread
        self._thread = ThreadPoolExecutor(1, "llmcli-batches")

    async def start(self) -> None:
        """Go on with the batches of an earlier run. A folder that cannot be used is reported on
        standard error, and to clients.
        """
        if self._settings.files_folder is not None:
            try:
                await self.open_store()
            except ApiError as error:
                LOGGER.warning("batches: %s", error)

    async def stop(self) -> None:
        """Stop answering at once. Lines whose answers are not finished are answered after the next
        start. Files can still be read and written until close().
        """
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Let another process use the folder. Call stop() before."""
        self._thread.shutdown()
        self._stack.close()
        self._store = None

    async def open_store(self) -> FileStore:
        """Return the store, and open it at the first time. Raises ApiError if the server has none,
        or if it cannot be opened, and ServerStopping.
        """
        folder = self._settings.files_folder
        if folder is None:
            raise ApiError("this server keeps no files; start it with --files-folder FOLDER", 501)
        return await _complete(self._open_once())

    async def _open_once(self) -> FileStore:
        """Return the store, and open it at the first time. Raises as open_store."""
        async with self._opening:
            if self._store is None:
                if self._is_stopping:
                    raise ServerStopping
                self._store = await asyncio.to_thread(self._open_store)
                self._tasks = [
                    asyncio.create_task(self._run(work))
                    for work in (self._answer_batches, self._keep_house)
                ]
        return self._store

    def _open_store(self) -> FileStore:
        """Open the store. Runs on another thread. Raises ApiError."""
        folder = self._settings.files_folder
        assert folder is not None
        self._model_hash = self._lines.read_model_hash()
        try:
            return self._stack.enter_context(open_store(folder, self._settings.max_files_bytes))
        except UserError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise ApiError(f"{error}{hint}", 503) from None

    @property
    def store(self) -> FileStore:
        """The store, which is open."""
        assert self._store is not None
        return self._store

    async def add(self, batch: StoredBatch) -> StoredBatch:
        """Add a new batch for the model of this server. Raises ApiError and UserError."""
        batch = replace(batch, model=self._lines.model_name, model_hash=self._model_hash)
        await asyncio.to_thread(self.store.add_batch, batch)
        self._chores.set()
        return batch

    async def cancel(self, batch_id: str) -> StoredBatch:
        """Cancel a batch that is not yet complete, and return its present state. The answers that it
        has so far become its files.
        """
        batch = await self._change(batch_id, "cancelling", UNCHECKED + UNFINISHED)
        if self._running and self._running.batch.id == batch_id:
            self._running.ending.set()
        self._chores.set()
        return batch

    def to_document(self, batch: StoredBatch) -> dict[str, Any]:
        """Return the OpenAI object of a batch in its present state."""
        obstacle = None
        if batch.is_open and batch.id in self._failing:
            obstacle = STORAGE_PROBLEM
        elif batch.is_open and batch.model_hash != self._model_hash:
            obstacle = MODEL_PROBLEM
        return batch.to_document(obstacle)

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run one of the two tasks until the server stops. After a bug in it, run it again."""
        while True:
            try:
                await work()
            except ServerStopping:  # its batch goes on after the next start
                return
            except Exception as error:  # noqa: BLE001 (other batches must not wait forever)
                log_bug(error)
                await asyncio.sleep(RETRY_SECONDS)

    async def _answer_batches(self) -> None:
        """Answer one batch after another."""
        while True:
            self._wake.clear()
            batch = next(filter(self._can_answer, list(self.store.batches.values())), None)
            if batch is None:
                await self._wake.wait()
            else:
                await self._attempt(batch, self._answer_batch)
                self._chores.set()

    def _can_answer(self, batch: StoredBatch) -> bool:
        """Return whether the lines of a batch can be answered now."""
        return (
            batch.status == "in_progress"
            and batch.model_hash == self._model_hash
            and batch.id not in self._busy | self._failing
            and not _is_over(batch)
        )

    async def _keep_house(self) -> None:
        """Check new batches, close those that get no further answers, and remove what has
        expired.
        """
        while True:
            self._chores.clear()
            for batch in list(self.store.batches.values()):
                # the state may have changed while another batch was closed
                batch = self.store.batches.get(batch.id, batch)
                if not batch.is_open or batch.id in self._busy | self._failing:
                    continue
                if batch.status == "validating":
                    await self._attempt(batch, self._validate)
                elif batch.status != "in_progress" or _is_over(batch):
                    await self._attempt(batch, self._close_batch)
            await asyncio.to_thread(self.store.remove_expired)
            batches = list(self.store.batches.values())
            ends = [batch.expires_at for batch in batches if batch.is_open]
            seconds = min([CHORE_SECONDS, *(max(1.0, end - time.time() + 1) for end in ends)])
            # wait_for() of Python 3.11 swallows a cancellation that comes just after the event
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._chores.wait()

    async def _attempt(
        self, batch: StoredBatch, work: Callable[[StoredBatch], Awaitable[None]]
    ) -> None:
        """Do some work for a batch. If the disk fails, it is tried again later; if its
        input is lost, or at a bug, the batch fails. Raises ServerStopping.
        """
        self._busy.add(batch.id)
        try:
            try:
                await work(batch)
            except InputLost as error:
                await self._change(
                    batch.id, "failed", problems=(BatchProblem("invalid_file", str(error)),)
                )
            except (UserError, OSError, _Interrupted):
                raise
            except Exception as error:  # noqa: BLE001 (the batch ends, and its client reads it)
                log_bug(error)
                problem = BatchProblem("server_error", BUG_TEXT)
                await self._change(batch.id, "failed", problems=(problem,))
        except ServerStopping:
            raise
        except _Interrupted:
            pass
        except (UserError, OSError) as error:
            LOGGER.warning("batch %s: %s", batch.id, error)
            self._failing.add(batch.id)
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._retry, batch.id)
        finally:
            self._busy.discard(batch.id)

    def _retry(self, batch_id: str) -> None:
        """Let a batch be tried again."""
        self._failing.discard(batch_id)
        self._wake.set()
        self._chores.set()

    async def _validate(self, batch: StoredBatch) -> None:
        """Check the input of a batch."""

        def check() -> tuple[int, tuple[BatchProblem, ...]]:
            with self._open_input(batch) as source:
                lines = self._watched(source.lines(), batch.id)
                return check_input(lines, batch.endpoint, self._settings.max_body)

        n_total, problems = await asyncio.to_thread(check)
        if problems:
            await self._change(batch.id, "failed", UNCHECKED, problems=problems)
        else:
            await self._change(batch.id, "in_progress", UNCHECKED, n_total=n_total)
            self._wake.set()

    def _watched(self, items: Iterable[T], batch_id: str) -> Iterator[T]:
        """Yield the items. Raises _Interrupted if the batch was cancelled or the server stops."""
        for item in items:
            if self._is_stopping or self.store.batches[batch_id].status == "cancelling":
                raise _Interrupted
            yield item

    async def _answer_batch(self, batch: StoredBatch) -> None:
        """Answer the lines of a batch, and close it."""
        async with self._opened(batch) as running:
            self._running = running
            try:
                await self._answer_lines(running)
            finally:
                self._running = None
            await self._close(running)

    async def _close_batch(self, batch: StoredBatch) -> None:
        """Close a batch that gets no further answers."""
        if batch.status == "cancelling" and TIME_FIELDS["in_progress"] not in batch.times:
            await self._change(batch.id, "cancelled")  # no line was answered
            return
        async with self._opened(batch) as running:
            await self._close(running)

    async def _answer_lines(self, running: _RunningBatch) -> None:
        """Answer the lines that are not in the journal. Return early if the batch was cancelled, its
        time is over, or the store is full.
        """
        batch = running.batch
        lines = (line for line in running.source.lines() if not running.journal.has(line.index))
        max_tasks = self._lines.parallel(batch.endpoint)
        waiting, tasks = deque[InputLine](), set[asyncio.Task[None]]()
        is_read = False
        ending = asyncio.ensure_future(running.ending.wait())
        if self.store.batches[batch.id].status != "in_progress":
            running.ending.set()
        try:
            while not (running.ending.is_set() or _is_over(batch)):
                if not (waiting or is_read):
                    waiting += await self._in_thread(partial(_read_window, lines))
                    is_read = not waiting
                if not (waiting or tasks):
                    return
                while waiting and len(tasks) < max_tasks:
                    tasks.add(asyncio.ensure_future(self._answer_line(running, waiting.popleft())))
                seconds = min(CHORE_SECONDS, max(0.0, batch.expires_at - time.time() + 1))
                done, _ = await asyncio.wait(
                    {*tasks, ending}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done - {ending}:
                    task.result()  # raises ServerStopping, and errors of the disk
                tasks -= done
        finally:
            for task in (ending, *tasks):
                task.cancel()
            await asyncio.gather(ending, *tasks, return_exceptions=True)

    async def _answer_line(self, running: _RunningBatch, line: InputLine) -> None:
        """Answer a line, and write the answer or the error to the journal. Raises ServerStopping,
        and UserError if the journal cannot be written.
        """
        outputs, journal = running.lines.outputs, running.journal
        name: str | None = None
        result: Document | UserError
        try:
            request = await asyncio.to_thread(parse_line, line, has_template=True)
            name = request.custom_id
            result = await running.lines.answer(request, running.client)
        except ServerStopping:
            raise
        except Exception as error:  # noqa: BLE001 (a bug fails one line)
            if self._lines.is_stopping:  # all lines would fail with the same error
                raise ServerStopping from None
            log_bug(error)
            result = error if isinstance(error, UserError) else as_api_error(error)

        def write_line() -> bytes:
            outputs.remember_line(line, name)
            return outputs.output_line(line.index, result)

        raw = await asyncio.to_thread(write_line)
        try:
            self.store.reserve(len(raw))
        except ApiError:
            running.is_full = True
            running.ending.set()
            return
        running.n_journal_bytes += len(raw)
        try:
            await self._in_thread(partial(journal.append, line.index, raw))
        except OSError as error:
            raise write_error(journal.path, error) from None
        is_error = isinstance(result, UserError)
        batch = self.store.batches[running.batch.id]
        self.store.batches[batch.id] = replace(
            batch,
            n_completed=batch.n_completed + (not is_error),
            n_failed=batch.n_failed + is_error,
        )

    async def _close(self, running: _RunningBatch) -> None:
        """Write the files of a batch, and close it."""
        journal = running.journal
        await self._in_thread(journal.sync)
        batch = await self._change(running.batch.id, "finalizing", UNFINISHED)
        end: BatchStatus = "completed"
        reason = None
        if batch.status == "cancelling":
            end = "cancelled"
        elif journal.n_finished < journal.count:
            end, reason = ("expired", EXPIRED) if _is_over(batch) else (end, STORAGE_FULL)

        def lines() -> Iterator[bytes]:
            for raw in output_lines(journal, running.lines.outputs.id, running.source, reason):
                if self._is_stopping:
                    raise _Interrupted
                yield raw

        files = await self._in_thread(partial(write_files, self.store, lines, batch))
        await self._change(
            batch.id,
            end,
            output_file_id=files.output_id,
            error_file_id=files.error_id,
            n_completed=files.n_answers,
            n_failed=files.n_errors,
        )
        await self._in_thread(journal.remove)

    async def _change(
        self,
        batch_id: str,
        status: BatchStatus,
        before: Collection[BatchStatus] = OPEN_STATUSES,
        **changes: Any,
    ) -> StoredBatch:
        """Store a new status of a batch and its time, and return its present state. Nothing is
        changed unless its status is in `before`. Clients see only what is on the disk. Raises
        UserError. A client that disconnects does not interrupt it.
        """
        return await _complete(self._change_once(batch_id, status, before, changes))

    async def _change_once(
        self,
        batch_id: str,
        status: BatchStatus,
        before: Collection[BatchStatus],
        changes: dict[str, Any],
    ) -> StoredBatch:
        """Do what _change does, once it is its turn."""
        async with self._changing:
            batch = self.store.batches[batch_id]
            if batch.status not in before:
                return batch
            times = {**batch.times, TIME_FIELDS[status]: int(time.time())}
            changes |= {"status": status, "times": times}
            await asyncio.to_thread(self.store.save_batch, replace(batch, **changes))
            # lines may have been counted meanwhile
            batch = replace(self.store.batches[batch_id], **changes)
            self.store.batches[batch_id] = batch
            return batch

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Run a function on the thread that uses the journals. It is not interrupted."""
        return await _complete(asyncio.get_running_loop().run_in_executor(self._thread, function))

    @contextmanager
    def _open_input(self, batch: StoredBatch) -> Iterator[BatchInput]:
        """Open the input of a batch for the `with` block. Raises InputLost, or OSError if it cannot
        be opened now.
        """
        try:
            stream = self.store.open_content(batch.input_file_id)
        except OSError as error:
            if error.errno not in LOST_ERRNOS:
                raise
            raise InputLost(f"the file {batch.input_file_id} is not there any more") from None
        with stream:
            # clients must not learn the server's paths
            yield BatchInput(stream, "the file")

    @asynccontextmanager
    async def _opened(self, batch: StoredBatch) -> AsyncIterator[_RunningBatch]:
        """Open the input and the journal of a batch for the `async with` block, and count the lines
        in the journal. Raises UserError.
        """
        stack = ExitStack()
        try:
            running = await self._in_thread(partial(self._open, stack, batch))
            n_answers, n_errors = await self._in_thread(partial(count_lines, running.journal))
            self.store.batches[batch.id] = replace(
                self.store.batches[batch.id], n_completed=n_answers, n_failed=n_errors
            )
            yield running
        finally:
            await self._in_thread(stack.close)

    def _open(self, stack: ExitStack, batch: StoredBatch) -> _RunningBatch:
        """Open the input and the journal of a batch. Runs on the thread of the journals."""
        source = stack.enter_context(self._open_input(batch))
        survey = source.survey()
        identity = {"batch": batch.id, "input": survey.sha256, "lines": survey.count}
        path = self.store.journal_path(batch.id)
        journal = BatchJournal(path, identity, survey.count, permissions=FILE_MODE)
        try:
            stack.enter_context(journal.open())
        except ForeignJournal as error:
            LOGGER.warning("batch %s starts again: %s", batch.id, error)
            stack.enter_context(journal.open(force=True))
        running = _RunningBatch(batch, self._lines.open(batch, identity), journal, source)
        running.n_journal_bytes = journal.path.stat().st_size
        self.store.reserve(running.n_journal_bytes, is_limited=False)
        stack.callback(lambda: self.store.reserve(-running.n_journal_bytes))
        return running


async def _complete(work: Awaitable[T]) -> T:
    """Await some work, which goes on to its end if the caller is cancelled."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        # shielded again, because the caller may be cancelled once more
        await asyncio.gather(asyncio.shield(future), return_exceptions=True)
        raise


def _is_over(batch: StoredBatch) -> bool:
    """Return whether the completion window of a batch is over."""
    return time.time() > batch.expires_at


def _read_window(lines: Iterator[InputLine]) -> list[InputLine]:
    """Return the next lines of a batch; none at its end."""
    window, n_bytes = list[InputLine](), 0
    for line in islice(lines, WINDOW_LINES):
        window.append(line)
        n_bytes += len(line.raw)
        if n_bytes > WINDOW_BYTES:
            break
    return window
