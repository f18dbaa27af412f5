"""The bridge between asyncio and the engine: one thread owns the engine, and coroutines submit
requests to it and read the events of their answers.

Requests arrive through a queue. The events of one step, or of several short steps, are delivered to
the event loop together (event_batching.py). The engine never waits for a reader: unread events are
stored with their answer, and the answer continues to its end. Templates, tokens and grammars are
computed in worker threads.
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

from llmcli.api.errors import AnswerFailed, ServerBusy, ServerStopping, answer_error
from llmcli.errors import UserError
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.serve.engine_thread.event_batching import AnswerEvent, EventBatcher, call_on_loop
from llmcli.serve.engine_thread.metrics import ServerMetrics
from llmcli.types import Event

T = TypeVar("T")
WORKER_KINDS = "prompts", "grammars", "texts"
MAX_RETRY_SECONDS = 60  # upper limit of Retry-After


class PendingAnswers(AsyncIterator[Event]):
    """The answers to one or more requests, read by one coroutine: iterate over the events, then
    read `answers`.

    `event.sequence` is the number of the event's answer: the `samples` answers to the first request
    come first, then those to the next request. Closing the iterator early cancels the unfinished
    answers.
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

    async def __anext__(self) -> Event:
        while self.is_closed or not self._arrived:
            if self.is_closed or len(self._answers) == self.n_answers:
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
            # stop() has cancelled the answer; a reader that cancels its own answer reads no further
            # events
            if answer.finish == "cancelled":
                raise ServerStopping
            self._answers[event.sequence] = answer
        return event

    @property
    def has_unread_events(self) -> bool:
        """Whether an event has arrived that the reader has not read yet."""
        return bool(self._arrived)

    @property
    def answers(self) -> list[Answer]:
        """The finished answers, ordered by request and then by sample."""
        assert len(self._answers) == self.n_answers, "read them after the events"
        return [self._answers[number] for number in range(self.n_answers)]

    async def aclose(self) -> None:
        """Cancel the unfinished answers. They end within one step of the engine."""
        if not self.is_closed:
            self.is_closed = True
            self._wake.set()
            self._bridge.drop(self)

    def deliver(self, events: list[AnswerEvent]) -> None:
        """Accept new events. Called on the event loop."""
        self._arrived += events
        self._wake.set()
        for _, answer in events:
            if answer is not None:
                self._bridge.metrics.record_answer(answer)

    def fail(self, error: BaseException) -> None:
        """Make the iteration raise this error. Called on the event loop."""
        self._error = error
        self._wake.set()


class EngineBridge:
    """Owns the engine's thread until close(). Call the methods from coroutines, unless a method
    says otherwise.

    `parallel`: number of answers that run at once; `max_waiting`: number of additional answers that
    may wait. A request for n samples counts as n answers. `batch_seconds`: longest time for which
    tokens may be batched (event_batching.py).
    """

    def __init__(
        self, runner: Runner, parallel: int = 4, max_waiting: int = 64, batch_seconds: float = 0.0
    ) -> None:
        self.runner, self.parallel, self.max_waiting = runner, parallel, max_waiting
        self.metrics = ServerMetrics()
        self._batcher = EventBatcher(batch_seconds)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # By the engine's id of an answer: its reader, and its number for the reader.
        self._streams: dict[int, tuple[PendingAnswers, int]] = {}
        self._lock = threading.Lock()
        self._open = 0  # unfinished answers
        self._answer_seconds = 1.0  # smoothed duration of an answer, from its first pass
        self._stopping = self._ended = False
        self._error: BaseException | None = None
        self._idle: list[Future[None]] = []
        # Called on the engine's thread if an unexpected error ends it.
        self.on_engine_death: Callable[[], None] = lambda: None
        # One thread renders templates and tokenizes their texts, one compiles grammars (two threads
        # must not use a template or a grammar at once). A third one tokenizes other texts, so that
        # a long text does not delay prompts.
        self._workers = {kind: ThreadPoolExecutor(1, f"llmcli-{kind}") for kind in WORKER_KINDS}
        self._worker_locks = {kind: threading.Lock() for kind in WORKER_KINDS}
        self._thread = threading.Thread(target=self._run, name="llmcli-engine", daemon=True)
        self._thread.start()

    @property
    def is_stopping(self) -> bool:
        """Whether the bridge has stopped accepting requests."""
        return self._stopping or self._error is not None

    @property
    def n_open(self) -> int:
        """Number of unfinished answers, running and waiting."""
        return self._open

    def answer(self, *requests: Request, samples: int = 1) -> PendingAnswers:
        """Submit requests that `runner.check` has accepted, and return their answers. Each request
        gets `samples` answers.

        Raises ServerBusy or ServerStopping at once.
        """
        if self.is_stopping:
            self.metrics.record_rejection("stopping")
            raise self._error or ServerStopping()
        answering = PendingAnswers(self, requests, samples)
        with self._lock:
            if self._open and self._open + answering.n_answers > self.parallel + self.max_waiting:
                self.metrics.record_rejection("busy")
                raise ServerBusy(self._open, self._retry_after())
            self._open += answering.n_answers
        self._inbox.put(partial(self._submit, answering, time.perf_counter()))
        return answering

    async def run_on_engine_thread(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps, and return its result."""
        return await asyncio.wrap_future(self._enqueue(function))

    async def run_in_worker(
        self,
        function: Callable[..., T],
        *args: object,
        kind: str = "prompts",
        is_short: bool = False,
    ) -> T:
        """Run a function in a worker thread and return its result. `kind`: "prompts" (templates and
        their tokens), "grammars", or "texts" (other texts to tokenize).

        `is_short`: run the function on the event loop if the worker is idle, which avoids the wait
        for another thread on a busy machine.
        """
        making = self._worker_locks[kind]
        if is_short and making.acquire(blocking=False):
            try:
                return function(*args)
            finally:
                making.release()

        def made() -> T:
            with making:
                return function(*args)

        return await asyncio.get_running_loop().run_in_executor(self._workers[kind], made)

    async def drain(self, seconds: float) -> None:
        """Accept no more requests and wait for the running answers. After `seconds`, cancel those
        that still run.
        """
        self._stopping = True
        idle: Future[None] = Future()
        self._inbox.put(partial(self._add_idle_waiter, idle))
        waited = asyncio.wrap_future(idle)
        try:
            await asyncio.wait_for(asyncio.shield(waited), seconds)
        except TimeoutError:
            self.stop()
            await waited

    def stop(self) -> None:
        """Cancel every answer now. Each keeps the text that it has so far. Callable from any
        thread.
        """
        self._stopping = True
        self._inbox.put(self._cancel_all)
        self.runner.context.interrupt()

    def close(self) -> None:
        """End the engine's thread. Raises the error that ended the thread early, if there was one."""
        self._stopping = True
        self._inbox.put(self._end)
        self._thread.join()
        for writer in self._workers.values():
            writer.shutdown()
        if self._error is not None:
            raise self._error

    def drop(self, answering: PendingAnswers) -> None:
        """Cancel the unfinished answers of a reader that reads no more."""
        self._inbox.put(partial(self._drop, answering))

    # The following methods run on the engine's thread.

    def _run(self) -> None:
        try:
            self._run_engine()
        except BaseException as error:  # noqa: BLE001 (readers receive it, and close() raises it)
            self._error = error
            self._fail(error)
            self._notify_idle()
            self.on_engine_death()
        # answer until close(); after an engine error every later request receives the error
        while not (self._ended and self._inbox.empty()):
            self._inbox.get()()
            self._notify_idle()
        self._fail(self._error or ServerStopping())

    def _run_engine(self) -> None:
        engine = self.runner.engine
        while not self._ended:
            if not self._inbox.empty():
                self._batcher.flush()  # the new request may bring a long prompt
            while not self._inbox.empty() or not (engine.is_busy or self._ended):
                self._inbox.get()()
                self._notify_idle()  # answers may have ended, which a waiting drain() must know
            if engine.is_busy and not self._ended:
                self._step()
            self._notify_idle()

    def _step(self) -> None:
        engine, gathering, begun = self.runner.engine, self._batcher, time.perf_counter()
        try:
            if events := engine.step():
                self.metrics.record_token()
        except UserError as error:  # the error affects every answer of the pass
            for sequence in tuple(self._streams):
                engine.abort(sequence)
            self._fail(AnswerFailed(str(error), hint=error.hint))
            return
        for event in events:
            answering, number = self._streams[event.sequence]
            answer = None
            if event.finish is not None:
                answer = engine.pop_answer(event.sequence)
                del self._streams[event.sequence]
                self._record_time(answer)
            gathering.add(answering, replace(event, sequence=number), answer)
        if gathering.is_due(time.perf_counter() - begun) or not engine.is_steady:
            gathering.flush()

    def _submit(self, answering: PendingAnswers, submitted: float) -> None:
        if answering.is_closed or self._ended or self._error:
            self._count(-answering.n_answers)
            if answering.is_closed:
                self.metrics.record_cancelled(answering.n_answers)
            else:
                call_on_loop(
                    answering.loop, partial(answering.fail, self._error or ServerStopping())
                )
            return
        numbers = iter(range(answering.n_answers))
        try:
            for request in answering.requests:
                timed = (
                    request
                    if request.start_time is not None
                    else replace(request, start_time=submitted)
                )
                for sequence in self.runner.engine.submit_samples(timed, answering.samples):
                    self._streams[sequence] = answering, next(numbers)
        except UserError as error:
            self._drop(answering)
            self._count(-sum(1 for _ in numbers))
            call_on_loop(answering.loop, partial(answering.fail, error))

    def _drop(self, answering: PendingAnswers) -> None:
        self._batcher.drop(answering)
        for sequence in [
            sequence for sequence, (reader, _) in self._streams.items() if reader is answering
        ]:
            self.runner.engine.abort(sequence)
            del self._streams[sequence]
            self._count(-1)
            self.metrics.record_cancelled(1)

    def _cancel_all(self) -> None:
        for sequence in self._streams:
            self.runner.engine.cancel(sequence)

    def _fail(self, error: BaseException) -> None:
        self._batcher.flush()
        for answering in {id(reader): reader for reader, _ in self._streams.values()}.values():
            self._batcher.drop(answering)
            call_on_loop(answering.loop, partial(answering.fail, error))
        self._count(-len(self._streams))
        self._streams.clear()

    def _record_time(self, answer: Answer) -> None:
        self._count(-1)
        spent = (sum(token.ms for token in answer.tokens) - answer.queue_ms) / 1e3
        self._answer_seconds += (max(0.0, spent) - self._answer_seconds) / 8

    def _count(self, more: int) -> None:
        with self._lock:
            self._open += more

    def _retry_after(self) -> int:
        """Return the estimated number of seconds until all waiting answers have started."""
        return min(
            MAX_RETRY_SECONDS,
            max(1, round(self._answer_seconds * (self._open - self.parallel + 1) / self.parallel)),
        )

    def _enqueue(self, function: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._ended or self._error:
                future.set_exception(self._error or ServerStopping())
                return
            try:
                future.set_result(function())
            except UserError as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise

        if not self._thread.is_alive():
            raise self._error or ServerStopping()
        self._inbox.put(run)
        return future

    def _add_idle_waiter(self, over: "Future[None]") -> None:
        self._idle.append(over)

    def _notify_idle(self) -> None:
        while self._idle and (self._ended or self._error or not self.runner.engine.is_busy):
            over = self._idle.pop()
            if over.set_running_or_notify_cancel():
                over.set_result(None)

    def _end(self) -> None:
        self._ended = True
