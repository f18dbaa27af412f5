"""Measures what the drafts of one method bring: how often guesses are right, and the speed against
plain decoding.

For each kind of task there are two measurements. In the first, every draft is as long as possible,
whether or not that saves time: it shows the acceptance at each depth. In the second, the method
drafts as `--draft METHOD` does, and its answers and plain ones alternate in the order A B B A, so
that drift of the machine's speed hits both. The answers are greedy, and none reuses cached tokens.

The cost T(m) of a pass is measured before and after all answers, with an empty cache.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from llmcli.bench.spec.speed_bound import SpeedBound, find_bound
from llmcli.bench.spec.task_kinds import TaskKind
from llmcli.bench.statistics.paired_test import Comparison, Design, estimate_ratio
from llmcli.runtime.drafting.gain.pass_cost import PassCost, measure_pass_cost
from llmcli.runtime.requests.draft_counts import DraftCounts, sum_counts
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.base import Speculation
from llmcli.types import Message

CONFIDENCE = 0.95
MIN_SPEED_TOKENS = 8  # a pair with a shorter answer has no meaningful speed


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The measurements of a method with one kind of task.

    - `longest`: the drafts of the answers with the longest drafts. `n_longest_passes`: all passes
      of these answers.
    - `used`: the drafts of the answers in pairs. `n_tokens`, `n_passes`: all tokens and passes of
      these answers after their first tokens.
    - `comparison`: B / A, where A is plain decoding; None if all answers were too short.
    - `n_pairs`: pairs of answers. `n_same`: those whose two texts are equal.
    """

    task: str
    longest: DraftCounts
    n_longest_passes: int
    used: DraftCounts
    n_tokens: int
    n_passes: int
    comparison: Comparison | None
    n_pairs: int
    n_same: int

    @property
    def tokens_per_pass(self) -> float:
        """Return the average number of tokens of a pass, with drafts as the method makes them."""
        return self.n_tokens / self.n_passes if self.n_passes else 0.0

    @property
    def longest_tokens_per_pass(self) -> float:
        """Return the average number of tokens of a pass with the longest drafts."""
        return 1 + self.longest.n_right / self.n_longest_passes if self.n_longest_passes else 0.0


@dataclass(frozen=True, slots=True)
class MethodResult:
    """The measurements of a method. `cost`: the measured cost of passes."""

    method: str
    cost: PassCost
    tasks: tuple[TaskResult, ...]

    def bound(self, task: TaskResult) -> SpeedBound:
        """Return how fast a task can be with this method."""
        return find_bound(task.longest, task.n_longest_passes, self.cost)


class MethodTrial:
    """Answers prompts on one runner, plainly and with one of its drafters."""

    def __init__(self, runner: Runner, speculation: Speculation, n_tokens: int) -> None:
        """`speculation`: with only the drafter that is measured. `n_tokens`: the longest answer."""
        self.runner, self.n_tokens = runner, n_tokens
        self.used = speculation
        memory = runner.engine.ledger.memory
        max_rows = speculation.max_rows
        if memory.is_recurrent and memory.n_rs_seq:
            # more wrong guesses would need a checkpoint before each draft
            max_rows = min(max_rows, memory.n_rs_seq + 1)
        # passes with the longest drafts do not change the cost with which the method decides
        unused_cost = PassCost({1: 1.0})
        self.longest = replace(
            speculation,
            pass_cost=unused_cost,
            max_rows=max_rows,
            takes_longest=True,
            max_branches=1,  # the bound is that of single paths
        )

    @property
    def method(self) -> str:
        """Return the name of the method."""
        return self.used.drafters[0].name

    def plain(self, prompt: str) -> Answer:
        """Return the answer of plain decoding."""
        with self._unobserved():
            return self._answer(prompt, "plain", "")

    def drafted(self, prompt: str, client: str) -> Answer:
        """Return the answer with drafts as the method makes them."""
        self._use(self.used)
        return self._answer(prompt, "speculative", client)

    def drafted_longest(self, prompt: str, client: str) -> Answer:
        """Return the answer with the longest drafts."""
        self._use(self.longest)
        return self._answer(prompt, "speculative", client)

    def measure_cost(self) -> PassCost:
        """Return the cost of passes, measured with an empty cache."""
        self._empty_cache()
        with self._unobserved():
            return measure_pass_cost(self.runner.context, self.used.max_rows)

    @contextmanager
    def _unobserved(self) -> Iterator[None]:
        """Compute passes without the drafter, which otherwise copies and computes hidden states
        after each pass.
        """
        context = self.runner.context
        observe, context.on_computed = context.on_computed, None
        try:
            yield
        finally:
            context.on_computed = observe

    def _empty_cache(self) -> None:
        """Drop all cached tokens, also from host memory."""
        engine = self.runner.engine
        engine.ledger.evict_idle()
        for slot in range(self.runner.context.n_seq_max):
            engine.scheduler.idle_offload.drop_slot(slot)

    def _use(self, speculation: Speculation) -> None:
        engine = self.runner.engine
        engine.resources = replace(engine.resources, speculation=speculation)

    def _answer(self, prompt: str, strategy: str, client: str) -> Answer:
        """Return an answer without any cached tokens. `client`: answers of other clients are not
        used for drafts. Raises KeyboardInterrupt after Ctrl-C, which only ends the answer.
        """
        runner = self.runner
        self._empty_cache()
        tokens = (
            runner.encode_chat([Message("user", prompt)])
            if runner.template
            else runner.encode_text(prompt)
        )
        sampling = default_sampling().with_values({"temp": 0})
        reply = runner.reply(
            Request(tokens, sampling, self.n_tokens, strategy=strategy, client=client)
        )
        for _ in reply:
            pass
        if reply.answer.finish == "cancelled":
            raise KeyboardInterrupt
        return reply.answer


def measure_method(
    trial: MethodTrial,
    tasks: Sequence[TaskKind],
    n_pairs: int,
    tick: Callable[[], None] = lambda: None,
) -> MethodResult:
    """Measure all kinds of tasks, each with `n_pairs` pairs. `tick` is called after each pair, and
    after each answer with the longest drafts.
    """
    before = trial.measure_cost()
    results = tuple(measure_task(trial, task, n_pairs, tick) for task in tasks)
    return MethodResult(trial.method, join_costs(before, trial.measure_cost()), results)


def measure_task(
    trial: MethodTrial, task: TaskKind, n_pairs: int, tick: Callable[[], None] = lambda: None
) -> TaskResult:
    """Measure one kind of task. Its prompts follow one another in rounds. All answers of a round
    have a client of their own, so that no draft comes from an earlier answer to the same prompt.
    """
    longest = []
    for prompt in task.prompts:
        longest.append(trial.drafted_longest(prompt, f"{task.name} longest"))
        tick()
    plain_answers: list[Answer] = []
    drafted_answers: list[Answer] = []
    for number in range(n_pairs):
        round_number, index = divmod(number, len(task.prompts))
        prompt, client = task.prompts[index], f"{task.name} {round_number}"
        if number % 2 == 0:
            plain_answers.append(trial.plain(prompt))
        drafted_answers.append(trial.drafted(prompt, client))
        if number % 2:
            plain_answers.append(trial.plain(prompt))
        tick()
    return TaskResult(
        task.name,
        _sum_drafts(trial.method, longest),
        sum(answer.n_passes for answer in longest),
        _sum_drafts(trial.method, drafted_answers),
        sum(max(0, len(answer.tokens) - 1) for answer in drafted_answers),
        sum(answer.n_passes for answer in drafted_answers),
        compare_speeds(plain_answers, drafted_answers),
        n_pairs,
        sum(
            plain.text == drafted.text
            for plain, drafted in zip(plain_answers, drafted_answers, strict=True)
        ),
    )


def compare_speeds(
    plain_answers: Sequence[Answer], drafted_answers: Sequence[Answer]
) -> Comparison | None:
    """Compare the speeds after the first token. Pairs with a very short answer are left out; return
    None if there is no other.
    """
    rates = [
        (plain.tokens_per_second, drafted.tokens_per_second)
        for plain, drafted in zip(plain_answers, drafted_answers, strict=True)
        if min(len(plain.tokens), len(drafted.tokens)) >= MIN_SPEED_TOKENS
    ]
    if not rates:
        return None
    a, b = zip(*rates, strict=True)
    return estimate_ratio(a, b, Design(confidence=CONFIDENCE, allowance=0.0))


def join_costs(first: PassCost, second: PassCost) -> PassCost:
    """Return the cost with the shorter time for each number of rows, because other programs can
    only slow passes down. A number of rows that only one has keeps its ratio to one row.
    """
    single = min(first.single_seconds, second.single_seconds)
    seconds = {
        rows: min(first(rows), second(rows)) for rows in first.ratios.keys() & second.ratios.keys()
    }
    for rows in first.ratios.keys() ^ second.ratios.keys():
        measured = first if rows in first.ratios else second
        seconds[rows] = single * measured.ratio(rows)
    return PassCost(seconds)


def _sum_drafts(method: str, answers: Sequence[Answer]) -> DraftCounts:
    return sum_counts(method, (counts for answer in answers for counts in answer.drafts))
