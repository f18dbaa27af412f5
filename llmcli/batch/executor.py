"""Runs the answer plans (plans.py) of many input lines on one engine, with several requests running
at the same time.

A second thread reads lines and converts them to plans, one window of up to WINDOW_LINES lines at a
time. Each window is sorted by the prompts' tokens, so that prompts with a common prefix run one
after another and find the prefix in the cache. The result of a line is reported as soon as it is
finished, so that it is not lost if the run is interrupted.
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

# A window ends when it has this many lines, or when their prompts have this many tokens.
WINDOW_LINES, WINDOW_TOKENS = 1024, 1 << 18


@dataclass(slots=True, eq=False)
class BatchTask:
    """The work for one input line. Exactly one of `plan`, `error` and `engine_work` is set.

    - `index`: index of the line in the batch.
    - `plan`: generator that requests answers. `requests`: the requests that it yielded last;
      `answers`: for each of these, the finished answers by sample number; `n_missing`: number of
      their answers that are not finished.
    - `error`: the error of a line that cannot be answered.
    - `engine_work`: iterator for a line that needs no drawn tokens (embeddings). The executor
      advances it once between two passes of the engine. It yields None until the last step, which
      yields the document.
    """

    index: int
    plan: AnswerPlan | None
    requests: Sequence[SampleRequest] = ()
    answers: list[dict[int, Answer]] = field(default_factory=list)
    n_missing: int = 0
    error: UserError | None = None
    engine_work: "Iterator[Document | None] | None" = None

    @classmethod
    def begin(cls, index: int, plan: AnswerPlan) -> "BatchTask":
        """Start the plan and return a task with the plan's first requests. Raises UserError if the
        plan does.
        """
        task = cls(index, plan)
        task.set_requests(next(plan))
        return task

    def set_requests(self, requests: Sequence[SampleRequest]) -> None:
        """Replace the task's requests and start with no answers to them."""
        self.requests, self.answers = requests, [{} for _ in requests]
        self.n_missing = sum(request.samples for request in requests)

    def advance(self) -> "Document | UserError | None":
        """Send the answers of all current requests to the plan, which continues. Return the
        finished document, or the error if an answer or the plan failed. Return None if the plan
        yielded further requests, which are then the task's requests.
        """
        assert self.plan is not None
        answers = [
            [by_sample[number] for number in range(len(by_sample))] for by_sample in self.answers
        ]
        for answer in (drawn for samples in answers for drawn in samples):
            if answer.finish == "failed":
                assert answer.error
                if not isinstance(answer.error, UserError):
                    raise answer.error  # a bug
                return as_api_error(answer_error(answer.error))
        try:
            self.set_requests(self.plan.send(answers))
        except StopIteration as stop:
            document: Document = stop.value
            return document
        except UserError as error:
            return error
        return None


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """The request `task.requests[number]` of a task."""

    task: BatchTask
    number: int

    @property
    def request(self) -> SampleRequest:
        return self.task.requests[self.number]


class BatchExecutor:
    """Runs tasks on the engine of `runner`, with at most `parallel` answers at the same time.
    `on_done` is called with the index and the result of each task as soon as the task ends.

    `on_progress` is called after every pass of the engine. Counters of the run: `tokens` (drawn
    tokens), `prompt_tokens` (tokens of all prompts) and `cached_tokens` (prompt tokens that were in
    the cache). `is_stopped`: whether the run was interrupted.
    """

    def __init__(
        self, runner: Runner, parallel: int, on_done: Callable[[int, Document | UserError], None]
    ) -> None:
        self.runner, self.engine, self.parallel = runner, runner.engine, parallel
        self._on_done, self._may_start = on_done, admission_rule(runner)
        self.on_progress: Callable[[], None] = lambda: None
        self._ready: deque[TaskRequest] = deque()
        self._engine_work_tasks: deque[BatchTask] = deque()
        # The request and the sample number of each running answer, by the engine's sequence id.
        self._running: dict[int, tuple[TaskRequest, int]] = {}
        self.tokens = self.prompt_tokens = self.cached_tokens = 0
        self.is_stopped = False

    def stop(self) -> None:
        """Interrupt run(), which then returns within milliseconds. Any thread may call this."""
        self.is_stopped = True
        self.runner.context.interrupt()

    def run(self, tasks: Iterator[BatchTask]) -> None:
        """Run all tasks. Return early if stop() is called or Ctrl-C is pressed; unfinished answers
        are then discarded.
        """
        with ThreadPoolExecutor(1, "lines") as reader, on_interrupt(self.stop):
            window = reader.submit(_next_window, tasks)
            has_input = True
            try:
                while not self.is_stopped:
                    if has_input and self._needs_requests and (window.done() or not self._running):
                        has_input = self._accept_window(window)
                        window = reader.submit(_next_window, tasks)
                    self._submit_requests()
                    if not (self._running or self._engine_work_tasks or has_input):
                        return
                    self._advance_engine_work()
                    if self._running:
                        self._step()
                    self.on_progress()
            finally:
                for sequence in self._running:
                    self.engine.abort(sequence)
                self._running.clear()

    @property
    def _needs_requests(self) -> bool:
        """Whether to accept the next window: fewer requests are waiting than can run at the same
        time, and no task with `engine_work` is waiting.
        """
        return len(self._ready) < self.parallel and not self._engine_work_tasks

    def _accept_window(self, window: "Future[list[BatchTask]]") -> bool:
        """Wait for a window of tasks, report its tasks with errors, and queue the others. Return
        False if the window is empty, which means that the input has ended.
        """
        tasks = window.result()
        for task in tasks:
            if task.error:
                self._on_done(task.index, task.error)
            elif task.engine_work:
                self._engine_work_tasks.append(task)
        self._ready.extend(
            TaskRequest(task, number) for task in tasks for number in range(len(task.requests))
        )
        return bool(tasks)

    def _submit_requests(self) -> None:
        """Submit waiting requests to the engine until `parallel` answers run or the admission rule
        rejects a request. A request with more than `parallel` samples runs alone.
        """
        while self._ready:
            request = self._ready[0]
            n_running = len(self._running)
            if (
                n_running and n_running + request.request.samples > self.parallel
            ) or not self._may_start(request.request, bool(n_running)):
                return
            self._ready.popleft()
            ids = self.engine.submit_samples(request.request.request, request.request.samples)
            self._running |= {id_: (request, number) for number, id_ in enumerate(ids)}

    def _advance_engine_work(self) -> None:
        """Compute one step of the first waiting task with `engine_work`, if there is such a task.
        Report its result if this was the last step.
        """
        if not self._engine_work_tasks:
            return
        task = self._engine_work_tasks[0]
        assert task.engine_work is not None
        self.engine.settle()
        try:
            result: Document | UserError | None = next(task.engine_work)
        except UserError as error:
            result = error
        if result is not None:
            self._engine_work_tasks.popleft()
            self._on_done(task.index, result)

    def _step(self) -> None:
        """Run one pass of the engine and process the answers that end in it."""
        for event in self.engine.step():
            self.tokens += event.token is not None
            if event.finish is not None and event.finish != "cancelled":
                self._finish_sample(event.sequence)

    def _finish_sample(self, sequence: int) -> None:
        """Store the answer of an engine sequence that has ended. If it was the task's last missing
        answer, queue the plan's next requests or report the task's result.
        """
        request, number = self._running.pop(sequence)
        answer = request.task.answers[request.number][number] = self.engine.pop_answer(sequence)
        if not number:
            self.prompt_tokens += answer.prompt_tokens
            self.cached_tokens += answer.cached_tokens
        request.task.n_missing -= 1
        if request.task.n_missing:
            return
        result = request.task.advance()
        # A plan's next requests run before all others, because they often begin with the same
        # tokens as its last requests, which are still in the cache.
        if result is None:
            self._ready.extendleft(
                TaskRequest(request.task, number)
                for number in reversed(range(len(request.task.requests)))
            )
        else:
            self._on_done(request.task.index, result)


def _next_window(tasks: Iterator[BatchTask]) -> list[BatchTask]:
    """Return the tasks of the next window, sorted by the tokens of their first prompts. An empty
    list means that there are no more tasks.
    """
    window: list[BatchTask] = []
    tokens = 0
    for task in tasks:
        window.append(task)
        tokens += sum(len(request.request.tokens) for request in task.requests)
        if len(window) >= WINDOW_LINES or tokens >= WINDOW_TOKENS:
            break
    return sorted(window, key=lambda task: task.requests[0].request.tokens if task.requests else ())
