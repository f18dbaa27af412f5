"""Connects asyncio with the engine: one thread owns the engine; coroutines submit requests and read
events.

Requests arrive through a queue. The events of a step, or of a few short steps, are handed to the
event loop together (event_batching.py). The engine never waits for a reader: unread events are kept
with their answer, and every answer ends. Templates, tokens and grammars are computed in worker
threads.
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

from llmcli.api.errors import Busy, Failed, Stopping, failure
from llmcli.errors import UserError
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.serve.engine_thread.event_batching import Gathering, Told, soon
from llmcli.serve.engine_thread.metrics import Meter
from llmcli.types import Event
from quant.errors import Refusal

T = TypeVar("T")
KINDS = "prompts", "grammars", "texts"
LONGEST_WAIT = 60  # upper limit of Retry-After


class Answering(AsyncIterator[Event]):
    """The answers to some requests, for one coroutine: iterate over their events, then read
    `answers`.

    The `sequence` of an event is the number of its answer: first the `samples` of the first
    request, then those of the next one. Closing it early cancels unfinished answers.
    """

    def __init__(self, bridge: "Bridge", requests: tuple[Request, ...], samples: int) -> None:
        self._bridge, self.requests, self.samples = bridge, requests, samples
        self.count = len(requests) * samples
        self.loop = asyncio.get_running_loop()
        self._arrived: deque[Told] = deque()
        self._wake = asyncio.Event()
        self._answers: dict[int, Answer] = {}
        self._error: BaseException | None = None
        self.closed = False

    async def __anext__(self) -> Event:
        while self.closed or not self._arrived:
            if self.closed or len(self._answers) == self.count:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        event, answer = self._arrived.popleft()
        if answer is not None:
            if answer.finish == "failed":
                assert answer.error
                raise failure(answer.error)
            # cancelled by stop(): a reader that cancels does not read on
            if answer.finish == "cancelled":
                raise Stopping
            self._answers[event.sequence] = answer
        return event

    @property
    def waiting(self) -> bool:
        """Whether an event has arrived that was not read yet."""
        return bool(self._arrived)

    @property
    def answers(self) -> list[Answer]:
        """The finished answers, request by request, in the order of their seeds."""
        assert len(self._answers) == self.count, "read them after the events"
        return [self._answers[number] for number in range(self.count)]

    async def aclose(self) -> None:
        """Cancel unfinished answers; they end within a step."""
        if not self.closed:
            self.closed = True
            self._wake.set()
            self._bridge.forget(self)

    def take(self, events: list[Told]) -> None:
        """Accept new events. Called on the event loop."""
        self._arrived += events
        self._wake.set()
        for _, answer in events:
            if answer is not None:
                self._bridge.meter.over(answer)

    def fail(self, error: BaseException) -> None:
        """End the iteration with this error. Called on the event loop."""
        self._error = error
        self._wake.set()


class Bridge:
    """Owns the engine's thread until close(). Its methods are for coroutines unless they say
    otherwise.

    `parallel` answers run at once and `max_waiting` more may wait; a request for n samples counts
    n. `batch_seconds`: seconds for which tokens may be batched (event_batching.py).
    """

    def __init__(
        self, runner: Runner, parallel: int = 4, waiting: int = 64, every: float = 0.0
    ) -> None:
        self.runner, self.parallel, self.most_waiting = runner, parallel, waiting
        self.meter = Meter()
        self._batcher = Gathering(every)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # By the engine's id: the reader, and the number of its answer.
        self._streams: dict[int, tuple[Answering, int]] = {}
        self._lock = threading.Lock()
        self._open = 0  # unfinished answers
        self._answer_seconds = 1.0  # smoothed time of an answer from its first pass on
        self._stopping = self._ended = False
        self._error: BaseException | None = None
        self._idle: list[Future[None]] = []
        # Called on the engine's thread when a bug has ended it.
        self.died: Callable[[], None] = lambda: None
        # One thread for templates and their tokens, one for grammars (neither may be used by two
        # threads at once), and one for texts that are only tokenized, so that a long schema or text
        # does not delay other prompts.
        self._workers = {kind: ThreadPoolExecutor(1, f"llmcli-{kind}") for kind in KINDS}
        self._worker_locks = {kind: threading.Lock() for kind in KINDS}
        self._thread = threading.Thread(target=self._run, name="llmcli-engine", daemon=True)
        self._thread.start()

    @property
    def stopping(self) -> bool:
        """Whether no new requests are accepted."""
        return self._stopping or self._error is not None

    @property
    def open(self) -> int:
        """Number of unfinished answers, including those that wait."""
        return self._open

    def answer(self, *requests: Request, samples: int = 1) -> Answering:
        """Submit `samples` answers to each of some requests that `runner.check` has accepted.

        Raises ServerBusy or ServerStopping at once.
        """
        if self.stopping:
            self.meter.refused("stopping")
            raise self._error or Stopping()
        answering = Answering(self, requests, samples)
        with self._lock:
            if self._open and self._open + answering.count > self.parallel + self.most_waiting:
                self.meter.refused("busy")
                raise Busy(self._open, self._retry_after())
            self._open += answering.count
        self._inbox.put(partial(self._submit, answering, time.perf_counter()))
        return answering

    async def call(self, function: Callable[[], T]) -> T:
        """Return what `function` returns, run on the engine's thread between two steps."""
        return await asyncio.wrap_future(self._enqueue(function))

    async def prepare(
        self, function: Callable[..., T], *args: object, kind: str = "prompts", short: bool = False
    ) -> T:
        """Return what `function` returns, run in the worker thread of `kind`: "prompts" (templates
        and their tokens), "grammars", or "texts" (only tokenized).

        `is_short` work runs on the event loop if that worker is idle, which avoids the wait for
        another thread on a busy machine.
        """
        making = self._worker_locks[kind]
        if short and making.acquire(blocking=False):
            try:
                return function(*args)
            finally:
                making.release()

        def made() -> T:
            with making:
                return function(*args)

        return await asyncio.get_running_loop().run_in_executor(self._workers[kind], made)

    async def drain(self, seconds: float) -> None:
        """Accept no requests and wait for the running ones; cancel them after `seconds`."""
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
        """Cancel every answer now; each keeps its text so far. Callable from any thread."""
        self._stopping = True
        self._inbox.put(self._cancel_all)
        self.runner.context.interrupt()

    def close(self) -> None:
        """End the thread. Raises the error that ended it early, if any."""
        self._stopping = True
        self._inbox.put(self._end)
        self._thread.join()
        for writer in self._workers.values():
            writer.shutdown()
        if self._error is not None:
            raise self._error

    def forget(self, answering: Answering) -> None:
        """Drop an answer that has no reader any more."""
        self._inbox.put(partial(self._drop, answering))

    # The rest runs on the engine's thread.

    def _run(self) -> None:
        try:
            self._run_engine()
        except BaseException as error:  # noqa: BLE001 (readers receive it, and close() raises it)
            self._error = error
            self._fail(error)
            self._notify_idle()
            self.died()
        # until close(), every later request gets the error
        while not (self._ended and self._inbox.empty()):
            self._inbox.get()()
            self._notify_idle()
        self._fail(self._error or Stopping())

    def _run_engine(self) -> None:
        engine = self.runner.engine
        while not self._ended:
            if not self._inbox.empty():
                self._batcher.hand_over()  # the new request may bring a long prompt
            while not self._inbox.empty() or not (engine.busy or self._ended):
                self._inbox.get()()
                self._notify_idle()  # a drain may be all that is left to do
            if engine.busy and not self._ended:
                self._step()
            self._notify_idle()

    def _step(self) -> None:
        engine, gathering, begun = self.runner.engine, self._batcher, time.perf_counter()
        try:
            if events := engine.step():
                self.meter.heard()
        except UserError as error:  # the error concerns the whole pass
            for sequence in tuple(self._streams):
                engine.drop(sequence)
            self._fail(Failed(str(error), hint=error.hint))
            return
        for event in events:
            answering, number = self._streams[event.sequence]
            answer = None
            if event.finish is not None:
                answer = engine.answer(event.sequence)
                del self._streams[event.sequence]
                self._record_time(answer)
            gathering.add(answering, replace(event, sequence=number), answer)
        if gathering.due(time.perf_counter() - begun) or not engine.steady:
            gathering.hand_over()

    def _submit(self, answering: Answering, submitted: float) -> None:
        if answering.closed or self._ended or self._error:
            self._count(-answering.count)
            if answering.closed:
                self.meter.gone(answering.count)
            else:
                soon(answering.loop, partial(answering.fail, self._error or Stopping()))
            return
        numbers = iter(range(answering.count))
        try:
            for request in answering.requests:
                timed = (
                    request if request.started is not None else replace(request, started=submitted)
                )
                for sequence in self.runner.engine.sample(timed, answering.samples):
                    self._streams[sequence] = answering, next(numbers)
        except UserError as error:
            self._drop(answering)
            self._count(-sum(1 for _ in numbers))
            soon(answering.loop, partial(answering.fail, error))

    def _drop(self, answering: Answering) -> None:
        self._batcher.forget(answering)
        for sequence in [
            sequence for sequence, (reader, _) in self._streams.items() if reader is answering
        ]:
            self.runner.engine.drop(sequence)
            del self._streams[sequence]
            self._count(-1)
            self.meter.gone(1)

    def _cancel_all(self) -> None:
        for sequence in self._streams:
            self.runner.engine.cancel(sequence)

    def _fail(self, error: BaseException) -> None:
        self._batcher.hand_over()
        for answering in {id(reader): reader for reader, _ in self._streams.values()}.values():
            self._batcher.forget(answering)
            soon(answering.loop, partial(answering.fail, error))
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
        """Return the seconds until about all waiting answers have started."""
        return min(
            LONGEST_WAIT,
            max(1, round(self._answer_seconds * (self._open - self.parallel + 1) / self.parallel)),
        )

    def _enqueue(self, function: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._ended or self._error:
                future.set_exception(self._error or Stopping())
                return
            try:
                future.set_result(function())
            except Refusal as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise

        if not self._thread.is_alive():
            raise self._error or Stopping()
        self._inbox.put(run)
        return future

    def _add_idle_waiter(self, over: "Future[None]") -> None:
        self._idle.append(over)

    def _notify_idle(self) -> None:
        while self._idle and (self._ended or self._error or not self.runner.engine.busy):
            over = self._idle.pop()
            if over.set_running_or_notify_cancel():
                over.set_result(None)

    def _end(self) -> None:
        self._ended = True
