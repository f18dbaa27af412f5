"""Runs many answer plans through one engine, as many at once as it can, those with a common prefix
after one another.

Lines are read and turned into plans in a thread beside the engine's, one window at a time, and a
window is sorted by its tokens: a common prefix is still in the cache when the next prompt with it
starts. Finished tasks are reported at once, so that nothing is lost when the run is interrupted.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from llmcli.api.errors import failure, problem
from llmcli.api.forms.base import Document
from llmcli.batch.plans import Plan, Wanted
from llmcli.batch.rounds import admission
from llmcli.runtime.interrupt import on_interrupt
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from quant.errors import Refusal

# Lines that are prepared at once, and tokens of their prompts.
WINDOW, MOST_TOKENS = 1024, 1 << 18


@dataclass(slots=True, eq=False)
class Task:
    """One line: its plan, the requests that the plan waits for, and their answers.

    `error`: the error of a line that cannot be answered at all. `engine_work` computes the document
    on the engine's thread, between passes: it yields None while it has more to do, then the
    document.
    """

    index: int
    plan: Plan | None
    wanted: Sequence[Wanted] = ()
    got: list[dict[int, Answer]] = field(default_factory=list)  # by request: answers by sample
    open: int = 0  # answers that are missing
    refusal: Refusal | None = None
    aside: "Iterator[Document | None] | None" = None

    @classmethod
    def begin(cls, index: int, plan: Plan) -> "Task":
        """Return a task with the plan's first requests. Raises what the plan raises."""
        task = cls(index, plan)
        task.ask(next(plan))
        return task

    def ask(self, wanted: Sequence[Wanted]) -> None:
        """Set the requests that the plan waits for."""
        self.wanted, self.got = wanted, [{} for _ in wanted]
        self.open = sum(request.samples for request in wanted)

    def go_on(self) -> "Document | Refusal | None":
        """Give the plan its answers. Return its document or error, or None if it has further
        requests.
        """
        assert self.plan is not None
        answers = [
            [by_sample[number] for number in range(len(by_sample))] for by_sample in self.got
        ]
        for answer in (drawn for samples in answers for drawn in samples):
            if answer.finish == "failed":
                assert answer.error
                return problem(failure(answer.error))
        try:
            self.ask(self.plan.send(answers))
        except StopIteration as over:
            document: Document = over.value
            return document
        except Refusal as error:
            return error
        return None


@dataclass(frozen=True, slots=True)
class Part:
    """One request of a task."""

    task: Task
    number: int

    @property
    def wanted(self) -> Wanted:
        return self.task.wanted[self.number]


class Work:
    """Runs tasks on one engine; `on_done` is called with the index and the result of each, in the
    order in which they end.

    `tokens`: tokens that were drawn; `prompt_tokens`: tokens of all prompts, of which
    `cached_tokens` were in the cache; `is_stopped`: the run was interrupted. `on_progress` is
    called after every pass.
    """

    def __init__(
        self, runner: Runner, parallel: int, done: Callable[[int, Document | Refusal], None]
    ) -> None:
        self.runner, self.engine, self.parallel = runner, runner.engine, parallel
        self._done, self._admit = done, admission(runner)
        self.tell: Callable[[], None] = lambda: None
        self._ready: deque[Part] = deque()
        self._asides: deque[Task] = deque()
        # By the engine's id: the request, and the number of the sample.
        self._running: dict[int, tuple[Part, int]] = {}
        self.tokens = self.prompted = self.cached = 0
        self.stopped = False

    def stop(self) -> None:
        """End the run within milliseconds. Callable from another thread."""
        self.stopped = True
        self.runner.context.interrupt()

    def run(self, tasks: Iterator[Task]) -> None:
        """Run all tasks, or until stop() or Ctrl-C."""
        with ThreadPoolExecutor(1, "lines") as reader, on_interrupt(self.stop):
            window = reader.submit(_next_window, tasks)
            more = True
            try:
                while not self.stopped:
                    if more and self._needs_requests and (window.done() or not self._running):
                        more = self._accept_window(window)
                        window = reader.submit(_next_window, tasks)
                    self._submit_requests()
                    if not (self._running or self._asides or more):
                        return
                    self._advance_aside()
                    if self._running:
                        self._step()
                    self.tell()
            finally:
                for sequence in self._running:
                    self.engine.drop(sequence)
                self._running.clear()

    @property
    def _needs_requests(self) -> bool:
        """Whether the engine will soon have too few requests."""
        return len(self._ready) < self.parallel and not self._asides

    def _accept_window(self, window: "Future[list[Task]]") -> bool:
        """Accept the tasks of a prepared window; return whether there were any."""
        tasks = window.result()
        for task in tasks:
            if task.refusal:
                self._done(task.index, task.refusal)
            elif task.aside:
                self._asides.append(task)
        self._ready.extend(
            Part(task, number) for task in tasks for number in range(len(task.wanted))
        )
        return bool(tasks)

    def _submit_requests(self) -> None:
        """Submit as many requests as the engine can run at once."""
        while self._ready:
            request = self._ready[0]
            busy = len(self._running)
            if (busy and busy + request.wanted.samples > self.parallel) or not self._admit(
                request.wanted, bool(busy)
            ):
                return
            self._ready.popleft()
            ids = self.engine.sample(request.wanted.request, request.wanted.samples)
            self._running |= {id_: (request, number) for number, id_ in enumerate(ids)}

    def _advance_aside(self) -> None:
        """Advance the first task that needs no answers of the engine."""
        if not self._asides:
            return
        task = self._asides[0]
        assert task.aside is not None
        try:
            result: Document | Refusal | None = next(task.aside)
        except Refusal as error:
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
        answer = request.task.got[request.number][number] = self.engine.answer(sequence)
        if not number:
            self.prompted += answer.prompt_tokens
            self.cached += answer.cached_tokens
        request.task.open -= 1
        if request.task.open:
            return
        result = request.task.go_on()
        # Follow-up requests go first: the beginning of their prompts is in the cache.
        if result is None:
            self._ready.extendleft(
                Part(request.task, number) for number in reversed(range(len(request.task.wanted)))
            )
        else:
            self._done(request.task.index, result)


def _next_window(tasks: Iterator[Task]) -> list[Task]:
    """Return the tasks of the next window, sorted by their tokens."""
    window: list[Task] = []
    tokens = 0
    for task in tasks:
        window.append(task)
        tokens += sum(len(request.request.tokens) for request in task.wanted)
        if len(window) >= WINDOW or tokens >= MOST_TOKENS:
            break
    return sorted(window, key=lambda task: task.wanted[0].request.tokens if task.wanted else ())
