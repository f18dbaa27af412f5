#!/usr/bin/env python3
"""Compare the speed of speculative decoding with plain decoding, a few passes of each in turn.

usage: .venv/bin/python scripts/benchmarks/speculation.py MODEL.gguf [--draft DRAFT.gguf]
       [--prompts FOLDER] [--tokens 128] [--rounds 3] [--most 6] [--worst 20] [--tasks 20]
       [--only 2,14] [--groups leaning,free,known] [--cache q8_0] [-t N]

The model answers three groups of tasks greedily. "leaning" has twenty tasks whose answers repeat
their input (copies, edits, extractions, summaries of sonnets and lists of questions), and "free"
has twenty free questions. The texts come from FOLDER (default: ../shared/assets/prompts relative to
the repository). "known" answers the free questions with a drafter that knows the plain answers and
spoils one token in twenty, so that its acceptance is a = 0.95.

The machine's speed changes by tens of percent within seconds. Therefore both kinds of decoding
advance through the same answer in turn, each in its own context over one loaded model: a few passes
of one kind, then the other kind up to the same token, in alternating order. The two contexts are
exchanged every round. A third context has the same number of tokens in its cache. After every
second stretch it times a pass of one row, T(1), and a pass of m rows, T(m).

A task runs --rounds times. An answer is divided into eighths, and for each eighth the median over
the rounds counts; the 95% interval is bootstrapped over rounds. The --worst free tasks continue
until the interval is within 1.5% or --most rounds have run (--groups free --rounds 2 --worst 5
--most 16 looks for losses in about five minutes).

For each task the script prints the ratio of speeds (speculative / plain), the numbers of drafted
and of accepted tokens, and the bound: the ratio if each pass of m rows took T(m) and nothing else
took time. Both kinds must give the same text, as they do with quantized weights and --cache q8_0.
For "known", the bound is the maximum over the draft length g of
(1 - a^(g+1)) / (1 - a) / (T(g+1) / T(1)).
"""

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.draft_settings import DraftSettings
from llmcli.runtime.drafting.base import Drafter
from llmcli.runtime.drafting.gain.pass_cost import PASS_ROWS, PassCost
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import OpenedParts, Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.base import Speculation
from llmcli.types import Message
from tests.fixtures.drafts import Knowing

PROMPTS = Path(__file__).parents[3] / "shared" / "assets" / "prompts"
GREEDY = default_sampling().with_values({"temp": 0})
POEM_TASKS = (
    "Write this poem again, word for word:\n\n{}",
    "Write this poem again with each line numbered:\n\n{}",
    "Write this poem again, but say 'your' where it says 'thy':\n\n{}",
    "Correct the old spelling in this poem and write all of it:\n\n{}",
    "Copy the lines of this poem that speak of time or beauty:\n\n{}",
    "Summarize this poem; quote the lines that you mean:\n\n{}",
)
LIST_TASKS = (
    "Write this list again, numbered:\n\n{}",
    "Copy from this list the questions about people:\n\n{}",
    "Turn this list into a list of bullet points:\n\n{}",
    "Sort these questions by subject and write them all:\n\n{}",
)
KNOWN_ACCEPTANCE = 0.95
SIDES = ("plain", "speculative")
# Speculative decoding stops after STRETCH tokens and PASSES passes with drafts; then plain decoding
# computes the same number of tokens.
STRETCH, PASSES = 16, 4
PARTS = 8  # number of parts of an answer whose times are compared
MAX_HALF_WIDTH = 0.015  # half width of a free task's interval


@dataclass
class Walk:
    """One answer in progress. The constructor submits the request and computes the first token.

    `times`: for each token, the seconds between the first token and this one. `passes`: for each
    pass with drafts, the number of drafted and of accepted tokens. `answer`: set at the end.
    """

    runner: Runner
    request: Request
    times: list[float] = field(default_factory=lambda: [0.0])
    passes: list[tuple[int, int]] = field(default_factory=list)
    answer: Answer | None = None

    def __post_init__(self) -> None:
        engine = self.runner.engine
        engine.ledger.evict_idle()  # an empty cache, so that both sides use the same cells
        self.id = engine.submit(self.request)
        self.sequence = engine._live[self.id]
        while not (events := engine.step()):
            pass
        if events[-1].finish is not None:
            self.answer = engine.pop_answer(self.id)

    def advance_to(self, place: int) -> None:
        """Continue the answer until it has at least `place` tokens or has ended."""
        engine, sequence, times, passes = self.runner.engine, self.sequence, self.times, self.passes
        elapsed, last = times[-1], time.perf_counter()
        while len(times) < place and self.answer is None:
            n_drafted = len(sequence.draft)
            events = engine.step()
            now = time.perf_counter()
            n_tokens = sum(event.token is not None for event in events)
            if n_drafted:
                passes.append((n_drafted, min(n_drafted, n_tokens - 1)))
            # The tokens of a pass arrive together; each gets an equal share of its time.
            times += [elapsed + (now - last) * (index + 1) / n_tokens for index in range(n_tokens)]
            elapsed, last = elapsed + now - last, now
            if events and events[-1].finish is not None:
                self.answer = engine.pop_answer(self.id)


@dataclass
class Ruler:
    """A context that times llama.cpp's bare passes, with as many tokens in its cache as an answer
    has. `n_tokens` is the number of tokens in the cache.
    """

    context: Context
    n_tokens: int = 0
    turns: Iterator[int] = field(default_factory=count)

    def measure_at(self, n_tokens: int) -> tuple[int, float]:
        """Time a pass of m rows after `n_tokens` tokens, where m changes from call to call. Return
        m and T(m) / T(1).
        """
        if n_tokens < self.n_tokens:
            self.context.trim(0, n_tokens)
            self.n_tokens = n_tokens
        while self.n_tokens < n_tokens:
            self.n_tokens += self._pass(min(64, n_tokens - self.n_tokens), [False])[0]
        turn = next(self.turns)
        width = PASS_ROWS[turn % len(PASS_ROWS)]
        sizes = (1, width) if turn // len(PASS_ROWS) % 2 else (width, 1)
        seconds = {rows: self._timed(rows) for rows in sizes}
        return width, seconds[width] / seconds[1]

    def _timed(self, rows: int) -> float:
        """Return the mean seconds of a pass of `rows` rows. The first pass is not counted, because
        llama.cpp rebuilds its graph when the number of rows changes.
        """
        times = []
        for _ in range(2 if rows > 1 else 3):
            times.append(self._pass(rows, [True])[1])
            self.context.trim(0, self.n_tokens)
        return statistics.fmean(times[1:])

    def _pass(self, rows: int, with_logits: list[bool]) -> tuple[int, float]:
        start = self.n_tokens
        forward = self.context.prepare(
            BatchRows([5] * rows, range(start, start + rows), [0] * rows, with_logits * rows)
        )
        begun = time.perf_counter()
        forward()
        return rows, time.perf_counter() - begun


@dataclass
class Task:
    """One prompt and its measurements.

    `seconds`: for each side and round, the seconds of each of the PARTS of the answer. `prices`:
    measured T(m) / T(1) by m. `passes`: of all rounds, the numbers of drafted and accepted tokens.
    """

    prompt: tuple[int, ...]
    seconds: dict[str, list[list[float]]] = field(
        default_factory=lambda: {side: [] for side in SIDES}
    )
    prices: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    passes: list[tuple[int, int]] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    rounds: int = 0

    @property
    def tokens(self) -> int:
        """The number of tokens of the plain answer."""
        return len(self.answers["plain"].tokens)

    @property
    def drafted(self) -> float:
        """The number of drafted tokens per round."""
        return sum(drafted for drafted, _ in self.passes) / self.rounds

    @property
    def accepted(self) -> float:
        """The number of accepted draft tokens per round."""
        return sum(accepted for _, accepted in self.passes) / self.rounds

    @property
    def has_equal_texts(self) -> bool:
        """Whether speculative and plain decoding gave the same text."""
        return len({answer.text for answer in self.answers.values()}) == 1

    def ratio(self) -> tuple[float, float, float]:
        """Return the ratio of speeds, speculative / plain, and the low and the high end of its 95%
        bootstrap interval over rounds.
        """
        plain, speculative = (np.array(self.seconds[side]) for side in SIDES)  # [rounds, parts]
        draws = np.random.default_rng(1).integers(0, len(plain), (2000, *plain.shape))
        draw_totals = [
            np.median(np.take_along_axis(seconds[None], draws, 1), axis=1).sum(axis=1)
            for seconds in (plain, speculative)
        ]
        low, high = np.quantile(draw_totals[0] / draw_totals[1], (0.025, 0.975))
        return (
            float(np.median(plain, axis=0).sum() / np.median(speculative, axis=0).sum()),
            float(low),
            float(high),
        )

    def bound(self, curve: dict[int, float]) -> float:
        """Return the ratio of speeds if nothing but passes took time. `curve` has T(m) / T(1) by m.
        The first token is not counted, because its time belongs to the prompt.
        """
        n_tokens = sum(accepted + 1 for _, accepted in self.passes) / self.rounds
        pass_cost = sum(
            curve[min(width for width in PASS_ROWS if width > drafted)]
            for drafted, _ in self.passes
        )
        return (self.tokens - 1) / (self.tokens - 1 - n_tokens + pass_cost / self.rounds)


def curve(tasks: Iterable[Task]) -> dict[int, float]:
    """Return T(m) / T(1) for every m of PASS_ROWS: the median of the timed passes of all tasks,
    interpolated where no pass was timed.
    """
    prices_by_width: dict[int, list[float]] = {}
    for task in tasks:
        for width, prices in task.prices.items():
            prices_by_width.setdefault(width, []).extend(prices)
    interpolated = PassCost(
        {1: 1.0} | {width: statistics.median(prices) for width, prices in prices_by_width.items()}
    )
    return {width: interpolated(width) for width in PASS_ROWS}


@dataclass
class Bench:
    """The three contexts over one model: two runners that decode, and the ruler."""

    runners: list[Runner]
    ruler: Ruler
    args: argparse.Namespace

    def walk(self, task: Task, tokens: int) -> None:
        """Run one round of a task with answers of `tokens` tokens, and add the measurements to the
        task.
        """
        swapped = task.rounds % 2
        walks = {
            side: Walk(
                runner, Request(task.prompt, GREEDY, tokens, allow_repetition=True, strategy=side)
            )
            for side, runner in zip(SIDES, self.runners[:: -1 if swapped else 1], strict=True)
        }
        plain, speculative = (walks[side] for side in SIDES)
        for turn in count(task.rounds):
            place, passes = len(plain.times) + STRETCH, len(speculative.passes)
            if turn % 2:
                plain.advance_to(place)
            speculative.advance_to(place)
            while 0 < len(speculative.passes) - passes < PASSES and speculative.answer is None:
                speculative.advance_to(len(speculative.times) + 1)
            plain.advance_to(len(speculative.times))
            if plain.answer or speculative.answer:
                break
            if tokens > self.args.tokens or (turn - task.rounds) % 2 == 0:
                width, price = self.ruler.measure_at(len(task.prompt) + len(plain.times))
                task.prices[width].append(price)
        plain.advance_to(tokens)
        for side, walk in walks.items():
            assert walk.answer
            task.answers[side] = walk.answer
            marks = np.linspace(0, len(walk.times) - 1, PARTS + 1)
            task.seconds[side].append(
                np.diff(np.interp(marks, range(len(walk.times)), walk.times)).tolist()
            )
        task.passes += speculative.passes
        task.rounds += 1

    def use(self, drafters: Iterable[Drafter]) -> None:
        """Replace the drafters of both runners."""
        for runner in self.runners:
            resources = runner.engine.resources
            assert resources.speculation
            runner.engine.resources = replace(
                resources, speculation=replace(resources.speculation, drafters=tuple(drafters))
            )

    def task(self, text: str) -> Task:
        """Return a task whose prompt is the text in the model's chat template. Without a template,
        the prompt is the bare text.
        """
        runner = self.runners[0]
        return Task(
            runner.encode_chat([Message("user", text)])
            if runner.template
            else runner.encode_text(text)
        )


def tasks(folder: Path, number: int) -> tuple[list[str], list[str]]:
    """Return two lists of `number` texts: tasks whose answers repeat their input, and free
    questions.
    """
    poems = [
        poem.strip()
        for poem in re.split(r"\n\s*\n", (folder / "sonnet.txt").read_text())
        if poem.strip()
    ]
    if len(poems) < number:
        lines = (folder / "sonnet.txt").read_text().strip().splitlines()
        poems = ["\n".join(lines[at : at + 14]) for at in range(0, len(lines), 14)]
    questions = [
        json.loads(line)["turns"][0] for line in (folder / "vicuna_bench_question.jsonl").open()
    ]
    short = [question for question in questions if len(question) < 120]
    lists = ["\n".join(short[at : at + 8]) for at in range(0, len(short), 8)]
    leaning = [
        LIST_TASKS[at // 3 % len(LIST_TASKS)].format(lists[at % len(lists)])
        if at % 3 == 2
        else POEM_TASKS[at % len(POEM_TASKS)].format(poems[at % len(poems)])
        for at in range(number)
    ]
    return leaning, questions[: 4 * number : 4]


def group(bench: Bench, name: str, texts: list[str]) -> None:
    """Measure and print one group of tasks. In the group "free", the tasks with the lowest ratios
    continue until their intervals are narrow.
    """
    args, tasks_by_number = bench.args, {}
    for number, text in enumerate(texts, 1):
        if args.only and str(number) not in args.only.split(","):
            continue
        task = tasks_by_number[number] = bench.task(text)
        while task.rounds < args.rounds and tasks_by_number.get(number):
            bench.walk(task, args.tokens)
            if task.tokens < 32:
                print(
                    f"  {name} {number}: {tasks_by_number.pop(number).tokens} tokens are too few to measure"
                )
        if number in tasks_by_number:
            line(name, number, task)
    for number in sorted(tasks_by_number, key=lambda number: tasks_by_number[number].ratio())[
        : args.worst if name == "free" else 0
    ]:
        task, before = tasks_by_number[number], tasks_by_number[number].rounds
        while task.rounds < args.most and (
            task.rounds < 2 or np.ptp(task.ratio()[1:]) > 2 * MAX_HALF_WIDTH
        ):
            bench.walk(task, args.tokens)
        if task.rounds > before:
            line(name, number, task)
    print_group(name, list(tasks_by_number.values()))


def line(name: str, number: int, task: Task) -> None:
    """Print the figures of one task."""
    ratio, low, high = task.ratio()
    print(
        f"  {name} {number}: {task.tokens} tokens, ratio {ratio:.3f} ({low:.3f} to {high:.3f}, {task.rounds} rounds), "
        f"bound {task.bound(curve([task])):.3f}, drafted {task.drafted:.0f}, accepted {task.accepted:.0f}"
        f"{'' if task.has_equal_texts else ', ANOTHER TEXT'}",
        flush=True,
    )


def print_group(name: str, tasks_measured: list[Task]) -> None:
    """Print the figures of a group of tasks."""
    if not tasks_measured:
        raise SystemExit(f"{name}: no answer was long enough to measure")
    prices = curve(tasks_measured)
    ratios = [task.ratio()[0] for task in tasks_measured]
    shares = [
        ratio / task.bound(prices) for ratio, task in zip(ratios, tasks_measured, strict=True)
    ]
    drafted, accepted, n_tokens = (
        sum(values)
        for values in zip(*((t.drafted, t.accepted, t.tokens) for t in tasks_measured), strict=True)
    )
    print(
        f"{name}: {len(tasks_measured)} tasks, {sum(task.has_equal_texts for task in tasks_measured)} with the same text, {n_tokens} tokens"
    )
    print(f"  T(m) / T(1) {_rounded(prices)}")
    print(
        f"  ratio    median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
    )
    print(f"  of bound median {statistics.median(shares):.3f}, least {min(shares):.3f}")
    share = accepted / max(1, drafted)
    print(
        f"  drafted  {drafted:.0f}, accepted {accepted:.0f} ({share:.0%}), {accepted / n_tokens:.0%} of the text",
        flush=True,
    )


def _rounded(prices: dict[int, float]) -> str:
    return ", ".join(f"{rows}: {price:.2f}" for rows, price in prices.items())


def known(bench: Bench, texts: list[str]) -> None:
    """Measure the group "known": a drafter knows the plain answer of each task and drafts it with
    an acceptance of KNOWN_ACCEPTANCE. Print the tasks and the share of the bound that is reached.
    """
    args, measured = bench.args, []
    for number, text in enumerate(texts, 1):
        task = bench.task(text)
        plain = Walk(
            bench.runners[0], Request(task.prompt, GREEDY, 2 * args.tokens, allow_repetition=True)
        )
        plain.advance_to(2 * args.tokens)
        assert plain.answer
        if len(plain.answer.tokens) < 64:
            continue
        ids, n_vocab = [token.id for token in plain.answer.tokens], bench.runners[0].model.n_vocab
        # each task has its own random seed
        bench.use([Knowing(ids, KNOWN_ACCEPTANCE, n_vocab=n_vocab, seed=number)])
        for _ in range(max(2, args.rounds // 2)):
            bench.walk(task, 2 * args.tokens)
        measured.append(task)
        line("known", number, task)
    print_group("known", measured)
    prices = curve(measured)
    passes = [counts for task in measured for counts in task.passes]
    accepted = sum(accepted for _, accepted in passes)
    reached = accepted / (accepted + sum(accepted < drafted for drafted, accepted in passes))
    ratios = [task.ratio()[0] for task in measured]
    for name, chance in (("asked", KNOWN_ACCEPTANCE), ("met", reached)):
        bound = max((1 - chance**width) / (1 - chance) / prices[width] for width in PASS_ROWS)
        shares = [ratio / bound for ratio in ratios]
        print(
            f"  acceptance {name} {chance:.3f}: bound {bound:.3f}, of the bound "
            f"median {statistics.median(shares):.3f}, from {min(shares):.3f} to {max(shares):.3f}"
        )


@contextmanager
def open_bench(args: argparse.Namespace) -> Iterator[tuple[Bench, Speculation]]:
    """Open the model with three contexts. Yields them, and the settings of speculation. Raises
    AssertionError if speculation cannot pay on this machine.
    """
    options = RunOptions(
        ctx_size=1024, threads=args.threads, cache_type_k=args.cache, cache_type_v=args.cache
    )
    plain = ContextOptions(
        1024,
        2048,
        512,
        1,
        args.threads,
        args.threads,
        args.cache,
        args.cache,
        n_outputs=PASS_ROWS[-1],
    )
    with (
        open_runner(args.model, options, drafting=DraftSettings("on", args.draft)) as runner,
        open_context(runner.model, plain) as second,
        open_context(runner.model, plain) as third,
    ):
        speculation = runner.engine.resources.speculation
        assert speculation, (
            "speculation cannot pay on this machine: no pass of several rows is cheaper than separate passes"
        )
        speculative_runner = Runner(
            OpenedParts(
                header=runner.header,
                model=runner.model,
                context=second,
                options=options,
                template=runner.template,
                load_ms=0.0,
                native_sampling=True,
                speculation=speculation,
                drafting=DraftSettings("on"),
            )
        )
        yield Bench([runner, speculative_runner], Ruler(third), args), speculation


def main() -> None:
    """Parse the flags, measure the groups and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=6)
    parser.add_argument(
        "--worst", type=int, default=20, help="free tasks that may get more than --rounds"
    )
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument(
        "--only", default="", help="numbers of tasks, e.g. 2,14, to measure only these"
    )
    parser.add_argument("--groups", default="leaning,free,known")
    parser.add_argument("--cache", default="q8_0")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    with open_bench(args) as (bench, speculation):
        single_ms, prices = (
            speculation.pass_cost.single_seconds * 1e3,
            _rounded(speculation.pass_cost.ratios),
        )
        print(
            f"at start-up: T(1) {single_ms:.2f} ms, T(m) / T(1) {prices}, equal rows up to {speculation.pass_cost.exact_rows}"
        )
        leaning, free = tasks(args.prompts, args.tasks)
        for name in args.groups.split(","):
            bench.use(speculation.drafters[-1:])
            if name == "known":
                known(bench, free)
            else:
                group(bench, name, {"leaning": leaning, "free": free}[name])


if __name__ == "__main__":
    main()
