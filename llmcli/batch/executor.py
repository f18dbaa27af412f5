"""Runs the answer plans of many lines on one engine: as many at once as it can run, and prompts
with a common prefix one after another.

A separate thread reads lines and converts them to plans, one window of lines at a time. A window is
sorted by the tokens of the prompts, so that a common prefix is still in the cache when the next
prompt with it starts. Finished tasks are reported at once, so that their results are not lost if
the run is interrupted.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from llmcli.api.errors import answer_error, as_api_error
from llmcli.api.forms.base import Document
from llmcli.batch.plans import AnswerPlan, SampleRequest
from llmcli.batch.rounds import admission_rule
from llmcli.runtime.interrupt import on_interrupt
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from quant.errors import UserError

# Lines that are prepared at once, and the tokens of their prompts.
WINDOW_LINES, WINDOW_TOKENS = 1024, 1 << 18


@dataclass(slots=True, eq=False)
class BatchTask:
    """The work for one line: its plan, the current requests of the plan, and their answers.

    `n_missing`: number of unfinished answers to the current requests. `error`: the error of a line
    that cannot be answered at all. `engine_work`: for a line without a plan, an iterator that
    computes the document on the engine's thread between passes. It yields None until its last step,
    which yields the document.
    """

    index: int
    plan: AnswerPlan | None
    requests: Sequence[SampleRequest] = ()
    # for each request, the answers by number of the sample
    answers: list[dict[int, Answer]] = field(default_factory=list)
    n_missing: int = 0  # unfinished answers
    error: UserError | None = None
    engine_work: "Iterator[Document | None] | None" = None

    @classmethod
    def begin(cls, index: int, plan: AnswerPlan) -> "BatchTask":
        """Return a task with the first requests of the plan. Raises the plan's errors."""
        task = cls(index, plan)
        task.set_requests(next(plan))
        return task

    def set_requests(self, requests: Sequence[SampleRequest]) -> None:
        """Set the requests whose answers the plan needs next."""
        self.requests, self.answers = requests, [{} for _ in requests]
        self.n_missing = sum(request.samples for request in requests)

    def advance(self) -> "Document | UserError | None":
        """Send the answers to the plan. Return the plan's document or error, or None if the plan
        has further requests.
        """
        assert self.plan is not None
        answers = [
            [by_sample[number] for number in range(len(by_sample))] for by_sample in self.answers
        ]
        for answer in (drawn for samples in answers for drawn in samples):
            if answer.finish == "failed":
                assert answer.error
                return as_api_error(answer_error(answer.error))
        try:
            self.set_requests(self.plan.send(answers))
        except StopIteration as over:
            document: Document = over.value
            return document
        except UserError as error:
            return error
        return None


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """One of the current requests of a task."""

    task: BatchTask
    number: int

    @property
    def request(self) -> SampleRequest:
        return self.task.requests[self.number]


class BatchExecutor:
    """Runs tasks on one engine. `on_done` is called with the index and the result of each task, in
    the order in which the tasks end.

    `tokens`: number of drawn tokens; `prompt_tokens`: number of tokens of all prompts;
    `cached_tokens`: how many of these were in the cache; `is_stopped`: whether the run was
    interrupted. `on_progress` is called after every pass.
    """

    def __init__(
        self, runner: Runner, parallel: int, on_done: Callable[[int, Document | UserError], None]
    ) -> None:
        self.runner, self.engine, self.parallel = runner, runner.engine, parallel
        self._done, self._admit = on_done, admission_rule(runner)
        self.on_progress: Callable[[], None] = lambda: None
        self._ready: deque[TaskRequest] = deque()
        self._asides: deque[BatchTask] = deque()
        # By the engine's id of an answer: the request, and the number of the sample.
        self._running: dict[int, tuple[TaskRequest, int]] = {}
        self.tokens = self.prompt_tokens = self.cached_tokens = 0
        self.is_stopped = False

    def stop(self) -> None:
        """Interrupt the run, which then ends within milliseconds. Callable from another thread."""
        self.is_stopped = True
        self.runner.context.interrupt()

    def run(self, tasks: Iterator[BatchTask]) -> None:
        """Run all tasks, unless stop() or Ctrl-C ends the run earlier."""
        with ThreadPoolExecutor(1, "lines") as reader, on_interrupt(self.stop):
            window = reader.submit(_next_window, tasks)
            more = True
            try:
                while not self.is_stopped:
                    if more and self._needs_requests and (window.done() or not self._running):
                        more = self._accept_window(window)
                        window = reader.submit(_next_window, tasks)
                    self._submit_requests()
                    if not (self._running or self._asides or more):
                        return
                    self._advance_aside()
                    if self._running:
                        self._step()
                    self.on_progress()
            finally:
                for sequence in self._running:
                    self.engine.abort(sequence)
                self._running.clear()

    @property
    def _needs_requests(self) -> bool:
        """Whether the next window is needed, because fewer requests are waiting than the engine can
        run at once.
        """
        return len(self._ready) < self.parallel and not self._asides

    def _accept_window(self, window: "Future[list[BatchTask]]") -> bool:
        """Add the tasks of a prepared window. Return whether it had any tasks."""
        tasks = window.result()
        for task in tasks:
            if task.error:
                self._done(task.index, task.error)
            elif task.engine_work:
                self._asides.append(task)
        self._ready.extend(
            TaskRequest(task, number) for task in tasks for number in range(len(task.requests))
        )
        return bool(tasks)

    def _submit_requests(self) -> None:
        """Submit waiting requests until the engine runs as many as it can."""
        while self._ready:
            request = self._ready[0]
            busy = len(self._running)
            if (busy and busy + request.request.samples > self.parallel) or not self._admit(
                request.request, bool(busy)
            ):
                return
            self._ready.popleft()
            ids = self.engine.submit_samples(request.request.request, request.request.samples)
            self._running |= {id_: (request, number) for number, id_ in enumerate(ids)}

    def _advance_aside(self) -> None:
        """Compute the next step of the first task that has `engine_work`."""
        if not self._asides:
            return
        task = self._asides[0]
        assert task.engine_work is not None
        try:
            result: Document | UserError | None = next(task.engine_work)
        except UserError as error:
            result = error
        if result is not None:
            self._asides.popleft()
            self._done(task.index, result)

    def _step(self) -> None:
        for event in self.engine.step():
            self.tokens += event.token is not None
            if event.finish is not None and event.finish != "cancelled":
                self._finish_sample(event.sequence)

    def _finish_sample(self, sequence: int) -> None:
        request, number = self._running.pop(sequence)
        answer = request.task.answers[request.number][number] = self.engine.pop_answer(sequence)
        if not number:
            self.prompt_tokens += answer.prompt_tokens
            self.cached_tokens += answer.cached_tokens
        request.task.n_missing -= 1
        if request.task.n_missing:
            return
        result = request.task.advance()
        # A plan's next requests come first, because the beginning of their prompts is in the cache.
        if result is None:
            self._ready.extendleft(
                TaskRequest(request.task, number)
                for number in reversed(range(len(request.task.requests)))
            )
        else:
            self._done(request.task.index, result)


def _next_window(tasks: Iterator[BatchTask]) -> list[BatchTask]:
    """Return the tasks of the next window, sorted by the tokens of their prompts."""
    window: list[BatchTask] = []
    tokens = 0
    for task in tasks:
        window.append(task)
        tokens += sum(len(request.request.tokens) for request in task.requests)
        if len(window) >= WINDOW_LINES or tokens >= WINDOW_TOKENS:
            break
    return sorted(window, key=lambda task: task.requests[0].request.tokens if task.requests else ())
