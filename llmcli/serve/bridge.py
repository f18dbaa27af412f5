"""Between asyncio and the engine: one thread owns the engine; coroutines ask it and read what
comes.

Requests go in through a queue. Out go the events of a step, or of a few short ones (gathering.py).
The engine never waits for a reader: what a slow reader has not read yet is kept with its answer,
and an answer has an end. Templates, tokens and grammars are made in further threads. It knows
nothing of HTTP.
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

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Unfollowable
from llmcli.runtime.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.serve.gathering import Gathering, Told, soon
from llmcli.serve.meter import Meter
from llmcli.types import Event
from quant.errors import Refusal

T = TypeVar("T")
KINDS = "prompts", "grammars", "texts"
LONGEST_WAIT = 60  # seconds: the most that Retry-After says


class Busy(UserError):
    """The queue is full; `retry_after` is in seconds."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(
            f"{waiting} requests are being answered or wait",
            hint=f"come back in {retry_after} s, or --max-waiting",
        )
        self.retry_after = retry_after


class Stopping(UserError):
    """The server is about to end and takes nothing new."""

    def __init__(self) -> None:
        super().__init__("the server is stopping", hint="start it again")


class Failed(UserError):
    """The model or the machine could not go on with an answer."""


def failure(error: UserError) -> UserError:
    """Why an answer failed, as its client is told: a grammar that leads nowhere is the request's
    own mistake.
    """
    return (
        error
        if isinstance(error, Unfollowable)
        else Failed(str(error), hint="ask again, or ask for something else")
    )


class Answering(AsyncIterator[Event]):
    """The answers to some requests, for one coroutine: iterate for their events, then read
    `answers`.

    An event's `sequence` is the number of its answer: first the `samples` of the first request,
    then those of the next. Closing it before the end cancels what is not finished.
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
            if answer.finish == "cancelled":  # by stop(): whoever cancels it reads no more
                raise Stopping
            self._answers[event.sequence] = answer
        return event

    @property
    def waiting(self) -> bool:
        """Whether an event has come that was not read yet."""
        return bool(self._arrived)

    @property
    def answers(self) -> list[Answer]:
        """The finished answers, request by request, each's in the order of their seeds."""
        assert len(self._answers) == self.count, "read them after the events"
        return [self._answers[number] for number in range(self.count)]

    async def aclose(self) -> None:
        """Cancel what is not finished; it ends within a step."""
        if not self.closed:
            self.closed = True
            self._wake.set()
            self._bridge.forget(self)

    def take(self, told: list[Told]) -> None:
        """Called on the loop, with new events."""
        self._arrived += told
        self._wake.set()
        for _, answer in told:
            if answer is not None:
                self._bridge.meter.over(answer)

    def fail(self, error: BaseException) -> None:
        """Called on the loop: no more events, for this reason."""
        self._error = error
        self._wake.set()


class Bridge:
    """Owns the engine's thread until close(). Its public methods are for coroutines, unless they
    say otherwise.

    `parallel` answers run at once and `waiting` more may wait; a request for n samples counts n.
    `every`: seconds that tokens may be gathered for (gathering.py).
    """

    def __init__(
        self, runner: Runner, parallel: int = 4, waiting: int = 64, every: float = 0.0
    ) -> None:
        self.runner, self.parallel, self.most_waiting = runner, parallel, waiting
        self.meter = Meter()
        self._gathering = Gathering(every)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: dict[
            int, tuple[Answering, int]
        ] = {}  # engine's id -> its Answering, the number of its answer
        self._lock = threading.Lock()
        self._open = 0  # answers asked for and not over
        self._seconds = 1.0  # that an answer took lately from its first pass on, smoothed
        self._stopping = self._ended = False
        self._error: BaseException | None = None
        self._idle: list[Future[None]] = []
        self.died: Callable[[], None] = lambda: (
            None
        )  # called on the engine's thread when a bug has ended its work
        # A thread for templates and their tokens, one for grammars (neither is safe to use twice at
        # once), and one for texts that are only tokenized. So a schema or a book that takes a
        # second delays nobody's prompt.
        self._writers = {kind: ThreadPoolExecutor(1, f"llmcli-{kind}") for kind in KINDS}
        self._making = {kind: threading.Lock() for kind in KINDS}
        self._thread = threading.Thread(target=self._run, name="llmcli-engine", daemon=True)
        self._thread.start()

    @property
    def stopping(self) -> bool:
        """Whether no new requests are taken."""
        return self._stopping or self._error is not None

    @property
    def open(self) -> int:
        """Answers asked for and not over, those that wait included."""
        return self._open

    def answer(self, *requests: Request, samples: int = 1) -> Answering:
        """Ask for `samples` answers to each of some requests that `runner.check` has passed.

        Raises Busy or Stopping at once.
        """
        if self.stopping:
            self.meter.refused("stopping")
            raise self._error or Stopping()
        answering = Answering(self, requests, samples)
        with self._lock:
            if self._open and self._open + answering.count > self.parallel + self.most_waiting:
                self.meter.refused("busy")
                raise Busy(self._open, self._patience())
            self._open += answering.count
        self._inbox.put(partial(self._submit, answering, time.perf_counter()))
        return answering

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` returns, run on the engine's thread between two steps."""
        return await asyncio.wrap_future(self._ask(function))

    async def prepare(
        self, function: Callable[..., T], *args: object, kind: str = "prompts", short: bool = False
    ) -> T:
        """What `function` returns, run in the thread of `kind`: "prompts" (templates and their
        tokens), "grammars", or "texts" (only to be tokenized).

        `short` work runs right here if that thread is idle. Where other programs kept both cores
        busy, an answer of one token took 3.7 ms instead of 17.7 at the third quartile, 2.9 instead
        of 3.1 at the median.
        """
        making = self._making[kind]
        if short and making.acquire(blocking=False):
            try:
                return function(*args)
            finally:
                making.release()

        def made() -> T:
            with making:
                return function(*args)

        return await asyncio.get_running_loop().run_in_executor(self._writers[kind], made)

    async def drain(self, seconds: float) -> None:
        """Take nothing new and wait for what is under way; after `seconds` the rest is cancelled."""
        self._stopping = True
        over: Future[None] = Future()
        self._inbox.put(partial(self._when_idle, over))
        waited = asyncio.wrap_future(over)
        try:
            await asyncio.wait_for(asyncio.shield(waited), seconds)
        except TimeoutError:
            self.stop()
            await waited

    def stop(self) -> None:
        """Cancel every answer now; each keeps what it has. Callable from any thread."""
        self._stopping = True
        self._inbox.put(self._cancel_all)
        self.runner.context.interrupt()

    def close(self) -> None:
        """End the thread. Raises the error that it died of, if it did."""
        self._stopping = True
        self._inbox.put(self._end)
        self._thread.join()
        for writer in self._writers.values():
            writer.shutdown()
        if self._error is not None:
            raise self._error

    def forget(self, answering: Answering) -> None:
        """Drop an answer that nobody reads any more."""
        self._inbox.put(partial(self._drop, answering))

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 (a bug of ours: whoever waits is told, and close() raises it)
            self._error = error
            self._fail(error)
            self._tell_idle()
            self.died()
        while not (self._ended and self._inbox.empty()):  # who comes now is told, until close()
            self._inbox.get()()
            self._tell_idle()
        self._fail(self._error or Stopping())

    def _work(self) -> None:
        engine = self.runner.engine
        while not self._ended:
            if not self._inbox.empty():
                self._gathering.hand_over()  # who comes now may bring a long prompt
            while not self._inbox.empty() or not (engine.busy or self._ended):
                self._inbox.get()()
                self._tell_idle()  # whoever waits for it may be all that is left
            if engine.busy and not self._ended:
                self._step()
            self._tell_idle()

    def _step(self) -> None:
        engine, gathering, begun = self.runner.engine, self._gathering, time.perf_counter()
        try:
            if events := engine.step():
                self.meter.heard()
        except UserError as error:  # of the whole pass: no other one would do better
            for one in tuple(self._streams):
                engine.drop(one)
            self._fail(Failed(str(error), hint=error.hint))
            return
        for event in events:
            answering, number = self._streams[event.sequence]
            answer = None
            if event.finish is not None:
                answer = engine.answer(event.sequence)
                del self._streams[event.sequence]
                self._over(answer)
            gathering.add(answering, replace(event, sequence=number), answer)
        if gathering.due(time.perf_counter() - begun) or not engine.steady:
            gathering.hand_over()

    def _submit(self, answering: Answering, asked: float) -> None:
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
                timed = request if request.started is not None else replace(request, started=asked)
                for one in self.runner.engine.sample(timed, answering.samples):
                    self._streams[one] = answering, next(numbers)
        except UserError as error:
            self._drop(answering)
            self._count(-sum(1 for _ in numbers))
            soon(answering.loop, partial(answering.fail, error))

    def _drop(self, answering: Answering) -> None:
        self._gathering.forget(answering)
        for one in [one for one, (whose, _) in self._streams.items() if whose is answering]:
            self.runner.engine.drop(one)
            del self._streams[one]
            self._count(-1)
            self.meter.gone(1)

    def _cancel_all(self) -> None:
        for one in self._streams:
            self.runner.engine.cancel(one)

    def _fail(self, error: BaseException) -> None:
        self._gathering.hand_over()
        for answering in {id(whose): whose for whose, _ in self._streams.values()}.values():
            self._gathering.forget(answering)
            soon(answering.loop, partial(answering.fail, error))
        self._count(-len(self._streams))
        self._streams.clear()

    def _over(self, answer: Answer) -> None:
        self._count(-1)
        spent = (sum(token.ms for token in answer.tokens) - answer.queue_ms) / 1e3
        self._seconds += (max(0.0, spent) - self._seconds) / 8

    def _count(self, more: int) -> None:
        with self._lock:
            self._open += more

    def _patience(self) -> int:
        """Seconds until about all that wait now have begun."""
        return min(
            LONGEST_WAIT,
            max(1, round(self._seconds * (self._open - self.parallel + 1) / self.parallel)),
        )

    def _ask(self, function: Callable[[], T]) -> "Future[T]":
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

    def _when_idle(self, over: "Future[None]") -> None:
        self._idle.append(over)

    def _tell_idle(self) -> None:
        while self._idle and (self._ended or self._error or not self.runner.engine.busy):
            over = self._idle.pop()
            if over.set_running_or_notify_cancel():
                over.set_result(None)

    def _end(self) -> None:
        self._ended = True
