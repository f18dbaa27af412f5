"""Many plans through one engine: as many answers at once as it runs, those that begin alike beside
one another.

Lines are read and made into plans in a thread beside the engine's, a window at a time, and a window
is sorted by its tokens: what many prompts have in front is still in the cache when the next of them
comes. Nothing is lost where it stops: whoever is told of what is done keeps it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from llmcli.runtime.interrupt import on_interrupt
from llmcli.runtime.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.serve.batch.plans import Plan, Wanted
from llmcli.serve.batch.rounds import admission
from llmcli.serve.bridge import failure
from llmcli.serve.problems import problem
from llmcli.serve.schema.base import Document
from quant.errors import Refusal

WINDOW, MOST_TOKENS = (
    1024,
    1 << 18,
)  # lines that are made ready at once, and tokens of their prompts


@dataclass(slots=True, eq=False)
class Task:
    """A line on its way: its plan, what it wants now, and what has come of it; `open` answers are
    still to come. `refusal`: it was over before it began. `aside` makes its document on the
    engine's thread, beside what runs: None while there is more to do.
    """

    index: int
    plan: Plan | None
    wanted: Sequence[Wanted] = ()
    got: list[dict[int, Answer]] = field(default_factory=list)
    open: int = 0
    refusal: Refusal | None = None
    aside: "Iterator[Document | None] | None" = None

    @classmethod
    def begin(cls, index: int, plan: Plan) -> "Task":
        """A task and what it wants first; raises what the plan raises."""
        task = cls(index, plan)
        task.ask(next(plan))
        return task

    def ask(self, wanted: Sequence[Wanted]) -> None:
        """The next requests of the plan."""
        self.wanted, self.got = wanted, [{} for _ in wanted]
        self.open = sum(one.samples for one in wanted)

    def go_on(self) -> "Document | Refusal | None":
        """Give the plan its answers. What it comes to, or None where it asks for more."""
        assert self.plan is not None
        answers = [[got[number] for number in range(len(got))] for got in self.got]
        for answer in (one for several in answers for one in several):
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
    """Runs tasks; `done` is told the index of each and what it came to, in the order in which they
    end.

    `tokens` were drawn, `cached` of `prompted` prompt tokens were there before. `stopped`: somebody
    did not want the rest. `tell` is called after every pass.
    """

    def __init__(
        self, runner: Runner, parallel: int, done: Callable[[int, Document | Refusal], None]
    ) -> None:
        self.runner, self.engine, self.parallel = runner, runner.engine, parallel
        self._done, self._admit = done, admission(runner)
        self.tell: Callable[[], None] = lambda: None
        self._ready: deque[Part] = deque()
        self._asides: deque[Task] = deque()
        self._running: dict[
            int, tuple[Part, int]
        ] = {}  # by the engine's id: whose, and which sample
        self.tokens = self.prompted = self.cached = 0
        self.stopped = False

    def stop(self) -> None:
        """End within milliseconds; callable from another thread."""
        self.stopped = True
        self.runner.context.interrupt()

    def run(self, tasks: Iterator[Task]) -> None:
        """All of them, or until stop() or Ctrl-C."""
        with ThreadPoolExecutor(1, "lines") as reader, on_interrupt(self.stop):
            window = reader.submit(_window, tasks)
            more = True
            try:
                while not self.stopped:
                    if more and self._hungry and (window.done() or not self._running):
                        more = self._take(window)
                        window = reader.submit(_window, tasks)
                    self._start()
                    if not (self._running or self._asides or more):
                        return
                    self._beside()
                    if self._running:
                        self._step()
                    self.tell()
            finally:
                for one in self._running:
                    self.engine.drop(one)
                self._running.clear()

    @property
    def _hungry(self) -> bool:
        """Whether there is soon too little to do."""
        return len(self._ready) < self.parallel and not self._asides

    def _take(self, window: "Future[list[Task]]") -> bool:
        """What was made ready meanwhile; False where that was the last."""
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

    def _start(self) -> None:
        """Hand the engine as much as it runs at once."""
        while self._ready:
            part = self._ready[0]
            busy = len(self._running)
            if (busy and busy + part.wanted.samples > self.parallel) or not self._admit(
                part.wanted, bool(busy)
            ):
                return
            self._ready.popleft()
            ids = self.engine.sample(part.wanted.request, part.wanted.samples)
            self._running |= {one: (part, number) for number, one in enumerate(ids)}

    def _beside(self) -> None:
        """A piece of one of those that the engine has nothing to do with."""
        if not self._asides:
            return
        task = self._asides[0]
        assert task.aside is not None
        try:
            came: Document | Refusal | None = next(task.aside)
        except Refusal as error:
            came = error
        if came is not None:
            self._asides.popleft()
            self._done(task.index, came)

    def _step(self) -> None:
        for event in self.engine.step():
            self.tokens += event.token is not None
            if event.finish is not None and event.finish != "cancelled":
                self._finished(event.sequence)

    def _finished(self, sequence: int) -> None:
        part, number = self._running.pop(sequence)
        answer = part.task.got[part.number][number] = self.engine.answer(sequence)
        if not number:
            self.prompted += answer.prompt_tokens
            self.cached += answer.cached_tokens
        part.task.open -= 1
        if part.task.open:
            return
        came = part.task.go_on()
        if (
            came is None
        ):  # those that follow go first: their prompts begin with what is in the cache
            self._ready.extendleft(
                Part(part.task, number) for number in reversed(range(len(part.task.wanted)))
            )
        else:
            self._done(part.task.index, came)


def _window(tasks: Iterator[Task]) -> list[Task]:
    """The next few tasks, sorted by the tokens they begin with."""
    found: list[Task] = []
    tokens = 0
    for task in tasks:
        found.append(task)
        tokens += sum(len(one.request.tokens) for one in task.wanted)
        if len(found) >= WINDOW or tokens >= MOST_TOKENS:
            break
    return sorted(found, key=lambda task: task.wanted[0].request.tokens if task.wanted else ())
