"""EngineBridge: connects the coroutines of a server with the engine, which runs on one thread.
Coroutines submit requests and read the events of their answers.

Requests go to the engine's thread through a queue. The events of one step, or of several short
steps, are delivered to the event loop together (event_batching.py). The engine never waits for a
reader: unread events are stored, and the answer continues to its end. Templates, tokenization and
grammars run in worker threads.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TypeVar
from weakref import WeakValueDictionary

from llmcli.api.errors import AnswerFailed, ServerBusy, ServerStopping, answer_error
from llmcli.errors import UserError
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.serve.engine_thread.bug_log import log_bug
from llmcli.serve.engine_thread.client_shares import ClientShares
from llmcli.serve.engine_thread.engine_watch import EngineWatch
from llmcli.serve.engine_thread.event_batching import AnswerEvent, EventBatcher, call_on_loop
from llmcli.serve.engine_thread.loss_reports import LossReports
from llmcli.serve.engine_thread.metrics import ServerMetrics
from llmcli.serve.engine_thread.server_log import ServerLog
from llmcli.types import Event, PromptProgress

T = TypeVar("T")
WORKER_KINDS = "prompts", "grammars", "texts"
FLUSH_SECONDS = 10.0  # how long the end of the engine waits for room to save states
MAX_RETRY_SECONDS = 60  # upper limit of Retry-After


class PendingAnswers(AsyncIterator[Event]):
    """The running answers to one or more requests, as an asynchronous iterator of their events for
    one coroutine. After the last event, the finished answers are in `answers`.

    The answers are ordered by request and then by sample; `event.sequence` is an answer's index in
    this order. `samples`: the number of answers to each request. Closing the iterator early cancels
    the unfinished answers.
    """

    def __init__(self, bridge: "EngineBridge", requests: tuple[Request, ...], samples: int) -> None:
        self._bridge, self.requests, self.samples = bridge, requests, samples
        self.n_answers = len(requests) * samples
        self.loop = asyncio.get_running_loop()
        self._arrived: deque[AnswerEvent] = deque()
        self._wake = asyncio.Event()
        self._answers: dict[int, Answer] = {}
        self._error: BaseException | None = None
        self.is_closed = False
        self.sequences: list[int] = []  # the engine's ids of the answers

    async def __anext__(self) -> Event:
        while self.is_closed or not self._arrived:
            if self.is_closed or self.has_finished:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        event, answer = self._arrived.popleft()
        if answer is not None:
            if answer.finish == "failed":
                assert answer.error
                raise answer_error(answer.error)
            # stop() has cancelled the answer; a reader that cancels its answers reads no more
            if answer.finish == "cancelled":
                raise ServerStopping
            self._answers[event.sequence] = answer
        return event

    @property
    def counted_client(self) -> str | None:
        """The client for whose share of the queue the answers count; None for background requests,
        and if there are no requests.
        """
        requests = self.requests
        return requests[0].client if requests and not requests[0].is_background else None

    @property
    def has_unread_events(self) -> bool:
        """Whether events have arrived that the reader has not read yet."""
        return bool(self._arrived)

    @property
    def has_finished(self) -> bool:
        """Whether the reader has read the last event of every answer."""
        return len(self._answers) == self.n_answers

    @property
    def answers(self) -> list[Answer]:
        """The finished answers, ordered by request and then by sample. Only available after the
        last event.
        """
        assert self.has_finished, "read them after the events"
        return [self._answers[number] for number in range(self.n_answers)]

    async def aclose(self) -> None:
        """Cancel the unfinished answers. The engine ends them within one step."""
        if not self.is_closed:
            self.is_closed = True
            self._wake.set()
            self._bridge.drop(self)

    def deliver(self, events: list[AnswerEvent]) -> None:
        """Store new events for the reader and wake it. Called on the event loop."""
        self._arrived += events
        self._wake.set()
        for _, answer in events:
            if answer is not None:
                self._bridge.metrics.record_answer(answer)

    def fail(self, error: BaseException) -> None:
        """Make the iteration raise this error after the stored events. Called on the event loop."""
        self._error = error
        self._wake.set()


class EngineBridge:
    """Runs the engine on its own thread from the constructor until close(). Call the methods from
    coroutines, unless a method says otherwise.

    - `parallel`: the number of answers that run at once.
    - `max_waiting`: the number of further answers that may wait. A request for n samples counts as
      n answers. If one client has taken all places, others still get their share of them
      (client_shares.py).
    - `batch_seconds`: the longest time for which tokens are held back to deliver them together
      (event_batching.py).
    - `n_background`: the number of unfinished answers to background requests. They take no places in
      the queue, and the code that submits them counts them.
    - `on_engine_death`: called on the engine's thread if an unexpected error ends the engine.
    """

    def __init__(
        self, runner: Runner, parallel: int = 4, max_waiting: int = 64, batch_seconds: float = 0.0
    ) -> None:
        self.runner, self.parallel, self.max_waiting = runner, parallel, max_waiting
        self.metrics, self.log = ServerMetrics(), ServerLog()
        self._batcher = EventBatcher(batch_seconds)
        self._watch = EngineWatch(runner.engine)
        # functions for the engine's thread, each with the most rows of a pass that it computes
        self._inbox: SimpleQueue[tuple[Callable[[], None], int]] = SimpleQueue()
        # the engine's id of an answer -> its reader, and its index in the reader's answers
        self._readers: dict[int, tuple[PendingAnswers, int]] = {}
        # the id of a response -> its answers, until their reader is gone
        self.named: WeakValueDictionary[str, PendingAnswers] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._open = self.n_background = 0  # numbers of unfinished answers
        self._shares = ClientShares(parallel + max_waiting)  # without background answers
        self._answer_seconds = 1.0  # smoothed duration of an answer, from its first pass
        self._stopping = self._ended = False
        self._error: BaseException | None = None
        self._idle: list[Future[None]] = []
        # Called on the engine's thread if an unexpected error ends it.
        self.on_engine_death: Callable[[], None] = lambda: None
        # Each kind has one thread, because two threads must not use a template or a grammar at
        # once. Other texts have their own thread, so that a long text does not delay prompts.
        self._workers = {kind: ThreadPoolExecutor(1, f"llmcli-{kind}") for kind in WORKER_KINDS}
        self._worker_locks = {kind: threading.Lock() for kind in WORKER_KINDS}
        runner.engine.on_progress = self._report_progress
        self.losses = LossReports(self.log, runner.model.piece)
        runner.engine.scheduler.admission.on_prefix_loss = self.losses.add
        if disk_cache := runner.engine.scheduler.disk_cache:
            disk_cache.on_room = disk_cache.loader.on_loaded = partial(self._put, lambda: None)
        self._thread = threading.Thread(target=self._run, name="llmcli-engine", daemon=True)
        self._thread.start()

    @property
    def is_stopping(self) -> bool:
        """Whether new requests are refused, because the server is stopping or the engine has
        failed.
        """
        return self._stopping or self._error is not None

    @property
    def n_open(self) -> int:
        """Number of unfinished answers, running and waiting."""
        return self._open

    def answer(self, *requests: Request, samples: int = 1) -> PendingAnswers:
        """Submit requests that `runner.check_request` has accepted, and return their answers. Each
        request gets `samples` answers.

        Raises ServerBusy if the queue is full for the client of the requests, and ServerStopping.
        Background requests find the queue never full.
        """
        if self.is_stopping:
            self.metrics.record_rejection("stopping")
            raise self._error or ServerStopping()
        pending = PendingAnswers(self, requests, samples)
        with self._lock:
            client = pending.counted_client
            if client is not None and not self._shares.take_places(client, pending.n_answers):
                n_open = self._shares.n_open
                self.metrics.record_rejection("busy")
                raise ServerBusy(n_open, self._retry_after(n_open))
            self._open += pending.n_answers
        self._put(partial(self._submit, pending, time.perf_counter()))
        return pending

    async def run_on_engine_thread(
        self, function: Callable[[], T], *, is_vital: bool = False, max_rows: int = 0
    ) -> T:
        """Run a function on the engine's thread between two steps, and return its result. An error
        of the function is raised here and harms no other call. `is_vital`: the function checks the
        state of the engine, so an error that is no UserError also ends the engine. `max_rows`: the
        largest number of rows of a pass that the function computes.
        """
        return await asyncio.wrap_future(self._enqueue(function, is_vital, max_rows))

    def check_responsive(self) -> None:
        """Raise the error that ended the engine's thread, or EngineStuck if the thread works on one
        pass for longer than its limit. Callable from any thread, and does not wait for the engine.
        """
        if self._error is not None or not self._thread.is_alive():
            raise self._error or ServerStopping()
        self._watch.check()

    async def run_in_worker(
        self,
        function: Callable[..., T],
        *args: object,
        kind: str = "prompts",
        is_short: bool = False,
    ) -> T:
        """Run a function in the worker thread for this kind of work and return its result. `kind`:
        "prompts" (rendering templates and tokenizing the result), "grammars", or "texts"
        (tokenizing other texts).

        If the function `is_short` and the worker is idle, run the function on the event loop
        instead, because switching threads takes long on a busy machine.
        """
        lock = self._worker_locks[kind]
        if is_short and lock.acquire(blocking=False):
            try:
                return function(*args)
            finally:
                lock.release()

        def run_locked() -> T:
            with lock:
                return function(*args)

        return await asyncio.get_running_loop().run_in_executor(self._workers[kind], run_locked)

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, and wait for the running answers. After `seconds`, cancel the
        unfinished ones.
        """
        self._stopping = True
        future: Future[None] = Future()
        self._put(partial(self._add_idle_waiter, future))
        idle = asyncio.wrap_future(future)
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(idle)
        except TimeoutError:
            self.stop()
            await idle

    def stop(self) -> None:
        """Cancel every answer now; each ends with the text that it has so far. Callable from any
        thread.
        """
        self._stopping = True
        self._put(self._cancel_all)
        self.runner.context.interrupt()

    def close(self) -> None:
        """End the engine's thread. Raises the error that ended the engine early, if there was
        one.
        """
        self._stopping = True
        self._put(self._end)
        self._thread.join()
        for worker in self._workers.values():
            worker.shutdown()
        self.log.close()
        if self._error is not None:
            raise self._error

    async def end_thinking(self, name: str, client: str) -> bool | None:
        """Make the answers of the response with the id `name` end their thinking. Return False if
        none of them thinks any more, and None if this client has no unfinished response of this id.
        """
        pending = self.named.get(name)
        if pending is None or pending.is_closed or pending.has_finished:
            return None
        if pending.requests[0].client != client:
            return None
        # the answers are submitted on the engine's thread, and may not have been yet
        return await self.run_on_engine_thread(
            lambda: self.runner.engine.end_thinking(*pending.sequences)
        )

    def drop(self, pending: PendingAnswers) -> None:
        """Cancel the unfinished answers of a reader that has stopped reading. A running pass that
        computes mostly their prompts is interrupted.
        """
        self._put(partial(self._drop, pending))
        self.runner.engine.cancel(*pending.sequences)

    # The following methods run on the engine's thread.

    def _run(self) -> None:
        """Run the engine until close(). If the engine fails, give its error to all readers and to
        all later requests.
        """
        try:
            self._run_engine()
        except BaseException as error:  # noqa: BLE001 (readers receive it, and close() raises it)
            self._error = error
            self._fail(error)
            self._notify_idle()
            self.on_engine_death()
        else:
            if disk_cache := self.runner.engine.scheduler.disk_cache:
                disk_cache.flush(FLUSH_SECONDS)
        # until close(), functions in the queue still run, and fail with the engine's error
        while not (self._ended and self._inbox.empty()):
            self._run_next()
            self._notify_idle()
        self._fail(self._error or ServerStopping())

    def _run_engine(self) -> None:
        """Alternate between the functions in the queue and steps of the engine; without either,
        wait.
        """
        engine, waits_for_disk = self.runner.engine, False
        while not self._ended:
            if not self._inbox.empty():
                self._batcher.flush()  # the next step may be long because of a new prompt
            while not self._inbox.empty() or not (
                (engine.is_busy and not waits_for_disk) or self._ended
            ):
                while self._inbox.empty() and self._save_state_part(is_idle=True):
                    pass
                self._run_next()
                waits_for_disk = False
                self._notify_idle()  # the function may have ended the last answer
            if engine.is_busy and not self._ended:
                self._watch.begin()
                self._step()
                waits_for_disk = engine.waits_for_disk
                if self._inbox.empty():
                    self._save_state_part(is_idle=not engine.is_busy)
            self._notify_idle()

    def _run_next(self) -> None:
        """Wait for the next function in the queue, and run it."""
        self._watch.end()
        function, max_rows = self._inbox.get()
        self._watch.begin(max_rows)
        function()

    def _save_state_part(self, is_idle: bool) -> bool:
        """Copy a part of the state of a finished answer, to be written to the prefix cache on disk.
        `is_idle`: no answers run. Return False if nothing can be copied now.
        """
        engine = self.runner.engine
        disk_cache = engine.scheduler.disk_cache
        if disk_cache is None or not disk_cache.has_pending:
            return False
        engine.settle()
        return disk_cache.save_part(is_idle)

    def _step(self) -> None:
        """Run one step of the engine and pass its events to the batcher."""
        engine, batcher, begun = self.runner.engine, self._batcher, time.perf_counter()
        try:
            if events := engine.step():
                self.metrics.record_token()
        except UserError as error:  # the error affects every answer of the pass
            for sequence in tuple(self._readers):
                engine.abort(sequence)
            self._fail(AnswerFailed(str(error), hint=error.hint))
            return
        for event in events:
            pending, number = self._readers[event.sequence]
            answer = None
            if event.finish is not None:
                answer = engine.pop_answer(event.sequence)
                del self._readers[event.sequence]
                # the reader has left since the functions in the queue ran
                if answer.finish == "cancelled" and pending.is_closed:
                    self._count_ended(pending, 1)
                    self.metrics.record_cancelled(1)
                    continue
                self._count_ended(pending, 1)
                self._record_time(answer)
                if answer.error is not None:
                    log_bug(answer.error)
            batcher.add(pending, event._replace(sequence=number), answer)
        if batcher.is_due(time.perf_counter() - begun) or not engine.is_steady:
            batcher.flush()

    def _report_progress(self, sequence: int, progress: PromptProgress) -> None:
        """Deliver the progress of a prompt at once, because the next pass may take long."""
        if reader := self._readers.get(sequence):
            pending, number = reader
            self._batcher.add(pending, Event(number, None, "", progress=progress), None)
            self._batcher.flush()

    def _submit(self, pending: PendingAnswers, submitted: float) -> None:
        """Submit requests to the engine, unless their reader has already closed the iterator.
        `submitted`: `time.perf_counter()` of the client's request.
        """
        if pending.is_closed or self._ended or self._error:
            self._count_ended(pending, pending.n_answers)
            if pending.is_closed:
                self.metrics.record_cancelled(pending.n_answers)
            else:
                call_on_loop(pending.loop, partial(pending.fail, self._error or ServerStopping()))
            return
        numbers = iter(range(pending.n_answers))
        try:
            for request in pending.requests:
                timed_request = (
                    request
                    if request.start_time is not None
                    else replace(request, start_time=submitted)
                )
                for sequence in self.runner.engine.submit_samples(timed_request, pending.samples):
                    self._readers[sequence] = pending, next(numbers)
                    pending.sequences.append(sequence)
        except Exception as error:  # noqa: BLE001 (the reader receives it)
            self._drop(pending)
            self._count_ended(pending, sum(1 for _ in numbers))
            call_on_loop(pending.loop, partial(pending.fail, error))

    def _drop(self, pending: PendingAnswers) -> None:
        self._batcher.drop(pending)
        for sequence in [
            sequence for sequence, (reader, _) in self._readers.items() if reader is pending
        ]:
            self.runner.engine.abort(sequence)
            del self._readers[sequence]
            self._count_ended(pending, 1)
            self.metrics.record_cancelled(1)

    def _cancel_all(self) -> None:
        for sequence in self._readers:
            self.runner.engine.cancel(sequence)

    def _fail(self, error: BaseException) -> None:
        """Make the iteration of every reader raise this error, and forget their answers."""
        self._batcher.flush()
        for pending in {id(reader): reader for reader, _ in self._readers.values()}.values():
            self._batcher.drop(pending)
            call_on_loop(pending.loop, partial(pending.fail, error))
        for pending, _ in self._readers.values():
            self._count_ended(pending, 1)
        self._readers.clear()

    def _record_time(self, answer: Answer) -> None:
        """Update the smoothed duration of an answer, which estimates Retry-After."""
        spent = (sum(token.ms for token in answer.tokens) - answer.queue_ms) / 1e3
        self._answer_seconds += (max(0.0, spent) - self._answer_seconds) / 8

    def _count_ended(self, pending: PendingAnswers, count: int) -> None:
        """Count `count` answers of a reader as finished."""
        client = pending.counted_client
        with self._lock:
            self._open -= count
            if count and client is not None:
                self._shares.return_places(client, count)

    def _retry_after(self, n_open: int) -> int:
        """Return the estimated number of seconds until all waiting answers have started. `n_open`:
        the number of unfinished answers.
        """
        return min(
            MAX_RETRY_SECONDS,
            max(1, round(self._answer_seconds * (n_open - self.parallel + 1) / self.parallel)),
        )

    def _put(self, function: Callable[[], None], max_rows: int = 0) -> None:
        """Put a function into the engine thread's queue. It may compute passes of at most
        `max_rows` rows.
        """
        self._inbox.put((function, max_rows))

    def _enqueue(self, function: Callable[[], T], is_vital: bool, max_rows: int = 0) -> "Future[T]":
        """Put a function into the engine thread's queue, and return a future of its result. The
        arguments are those of run_on_engine_thread().
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._ended or self._error:
                future.set_exception(self._error or ServerStopping())
                return
            try:
                self.runner.engine.settle()
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, UserError) and (
                    is_vital or not isinstance(error, Exception)
                ):
                    raise

        if not self._thread.is_alive():
            raise self._error or ServerStopping()
        self._put(run, max_rows)
        return future

    def _add_idle_waiter(self, idle_future: "Future[None]") -> None:
        self._idle.append(idle_future)

    def _notify_idle(self) -> None:
        """Resolve the futures of drain() if the engine has no unfinished answer."""
        while self._idle and (self._ended or self._error or not self.runner.engine.is_busy):
            idle_future = self._idle.pop()
            if idle_future.set_running_or_notify_cancel():
                idle_future.set_result(None)

    def _end(self) -> None:
        self._ended = True
