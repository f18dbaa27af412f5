#!/usr/bin/env python3
"""Compare speculative with plain decoding, a few passes of each in turn.

usage: .venv/bin/python scripts/benchmarks/speculation.py MODEL.gguf [--draft DRAFT.gguf]
       [--prompts FOLDER] [--tokens 128] [--rounds 3] [--most 6] [--worst 20] [--tasks 20]
       [--only 2,14] [--groups leaning,free,known] [--cache q8_0] [--threads N]

Twenty tasks whose answers repeat their input (copies, edits, extractions, summaries of sonnets and
lists of questions) and twenty free questions are answered greedily. They come from FOLDER (default:
../shared/assets/prompts beside the repository). The machine's speed changes by tens of percent
within seconds, so both kinds of decoding advance through the same answer side by side, each in its
own context over one loaded model: a few passes of one, then the other up to the same token, in
alternating order. A third context holds the same number of tokens; after every second stretch it
times passes of one and of m rows, which gives T(m) / T(1) of the same moment. Contexts change sides
every round. For each eighth of an answer the median over the rounds counts; the 95% interval is
bootstrapped over rounds. A task runs --rounds times. The --worst free tasks continue until the
interval is within 1.5% or --most rounds (--groups free --rounds 2 --worst 5 --most 16 looks for
losses in about five minutes).

For each task the script prints the ratio of speeds, the share of tokens that were drafted
correctly, and the bound: the ratio if each pass took T(m) and nothing else took time. The texts
must be equal (with quantized weights and --cache q8_0 they are). The last group uses a drafter that
has the plain answers and spoils one token in twenty: acceptance a = 0.95, against the maximum over
g of (1 - a^(g+1)) / (1 - a) / (T(g+1) / T(1)).
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

from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.draft_settings import DraftSettings
from llmcli.runtime.drafting.base import Drafter
from llmcli.runtime.drafting.pass_cost import PASS_ROWS, PassCost
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import OpenedParts, Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.base import Speculation
from llmcli.types import Message
from tests.fixtures.drafts import Knowing

PROMPTS = Path(__file__).parents[3] / "shared" / "assets" / "prompts"
GREEDY = default_sampling().with_values({"temp": 0})
ON_POEMS = (
    "Write this poem again, word for word:\n\n{}",
    "Write this poem again with each line numbered:\n\n{}",
    "Write this poem again, but say 'your' where it says 'thy':\n\n{}",
    "Correct the old spelling in this poem and write all of it:\n\n{}",
    "Copy the lines of this poem that speak of time or beauty:\n\n{}",
    "Summarize this poem; quote the lines that you mean:\n\n{}",
)
ON_LISTS = (
    "Write this list again, numbered:\n\n{}",
    "Copy from this list the questions about people:\n\n{}",
    "Turn this list into a list of bullet points:\n\n{}",
    "Sort these questions by subject and write them all:\n\n{}",
)
RIGHT = 0.95
SIDES = ("plain", "speculative")
STRETCH, PASSES = 16, 4  # tokens, and passes with drafts, before the other side's turn
PARTS = 8  # parts of an answer whose times are compared
NARROW = 0.015  # half width of a free task's interval


@dataclass
class Walk:
    """One answer in progress: tokens, and the seconds after the first one at which each arrived."""

    runner: Runner
    request: Request
    times: list[float] = field(default_factory=lambda: [0.0])
    passes: list[tuple[int, int]] = field(
        default_factory=list
    )  # number of drafted and of accepted tokens
    answer: Answer | None = None

    def __post_init__(self) -> None:
        engine = self.runner.engine
        engine.ledger.evict_idle()  # so that both sides use the same cells
        self.id = engine.submit(self.request)
        self.sequence = engine._live[self.id]
        while not (events := engine.step()):
            pass
        if events[-1].finish is not None:
            self.answer = engine.pop_answer(self.id)

    def to(self, place: int) -> None:
        """Advance to `place` tokens."""
        engine, sequence, times, passes = self.runner.engine, self.sequence, self.times, self.passes
        spent, last = times[-1], time.perf_counter()
        while len(times) < place and self.answer is None:
            guessed = len(sequence.draft)
            events = engine.step()
            now = time.perf_counter()
            made = sum(event.token is not None for event in events)
            if guessed:
                passes.append((guessed, min(guessed, made - 1)))
            # The tokens of a pass arrive together; each gets an equal share of its time.
            times += [spent + (now - last) * (index + 1) / made for index in range(made)]
            spent, last = spent + now - last, now
            if events and events[-1].finish is not None:
                self.answer = engine.pop_answer(self.id)


@dataclass
class Ruler:
    """A context with as many tokens as an answer, which times passes of llama.cpp alone."""

    context: Context
    held: int = 0
    turns: Iterator[int] = field(default_factory=count)

    def at(self, held: int) -> tuple[int, float]:
        """Return a number of rows, another one each time, and T(rows) / T(1) after `held` tokens."""
        if held < self.held:
            self.context.trim(0, held)
            self.held = held
        while self.held < held:
            self.held += self._pass(min(64, held - self.held), [False])[0]
        turn = next(self.turns)
        width = PASS_ROWS[turn % len(PASS_ROWS)]
        sizes = (1, width) if turn // len(PASS_ROWS) % 2 else (width, 1)
        taken = {rows: self._timed(rows) for rows in sizes}
        return width, taken[width] / taken[1]

    def _timed(self, rows: int) -> float:
        """Time a pass; a first pass with another number of rows rebuilds the graph and is not
        timed.
        """
        times = []
        for _ in range(2 if rows > 1 else 3):
            times.append(self._pass(rows, [True])[1])
            self.context.trim(0, self.held)
        return statistics.fmean(times[1:])

    def _pass(self, rows: int, wants: list[bool]) -> tuple[int, float]:
        at = self.held
        forward = self.context.prepare(
            BatchRows([5] * rows, range(at, at + rows), [0] * rows, wants * rows)
        )
        begun = time.perf_counter()
        forward()
        return rows, time.perf_counter() - begun


@dataclass
class Task:
    """One prompt and its measurements: for each round and side the seconds of each part of the
    answer.
    """

    prompt: tuple[int, ...]
    seconds: dict[str, list[list[float]]] = field(
        default_factory=lambda: {side: [] for side in SIDES}
    )
    prices: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # T(m) / T(1)
    passes: list[tuple[int, int]] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    rounds: int = 0

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the answer."""
        return len(self.answers["plain"].tokens)

    @property
    def drafted(self) -> float:
        """Return the number of drafted tokens per round."""
        return sum(drafted for drafted, _ in self.passes) / self.rounds

    @property
    def right(self) -> float:
        """Return the number of accepted tokens per round."""
        return sum(right for _, right in self.passes) / self.rounds

    @property
    def same(self) -> bool:
        """Return whether both sides gave the same text."""
        return len({answer.text for answer in self.answers.values()}) == 1

    def ratio(self) -> tuple[float, float, float]:
        """Return the ratio of speeds, speculative over plain, with its interval."""
        plain, other = (np.array(self.seconds[side]) for side in SIDES)  # [rounds, parts]
        draws = np.random.default_rng(1).integers(0, len(plain), (2000, *plain.shape))
        several = [
            np.median(np.take_along_axis(one[None], draws, 1), axis=1).sum(axis=1)
            for one in (plain, other)
        ]
        low, high = np.quantile(several[0] / several[1], (0.025, 0.975))
        return (
            float(np.median(plain, axis=0).sum() / np.median(other, axis=0).sum()),
            float(low),
            float(high),
        )

    def bound(self, curve: dict[int, float]) -> float:
        """Return the ratio if only passes took time; the first token belongs to the prompt."""
        made = sum(right + 1 for _, right in self.passes) / self.rounds
        spent = sum(
            curve[min(width for width in PASS_ROWS if width > drafted)]
            for drafted, _ in self.passes
        )
        return (self.tokens - 1) / (self.tokens - 1 - made + spent / self.rounds)


def curve(tasks: Iterable[Task]) -> dict[int, float]:
    """Return T(m) / T(1) over all timed passes."""
    timed: dict[int, list[float]] = {}
    for task in tasks:
        for width, prices in task.prices.items():
            timed.setdefault(width, []).extend(prices)
    known = PassCost(
        {1: 1.0} | {width: statistics.median(prices) for width, prices in timed.items()}
    )
    return {width: known(width) for width in PASS_ROWS}


@dataclass
class Bench:
    """The contexts over one model."""

    runners: list[Runner]
    ruler: Ruler
    asked: argparse.Namespace

    def walk(self, task: Task, tokens: int) -> None:
        """Run one round."""
        swapped = task.rounds % 2
        walks = {
            side: Walk(
                runner, Request(task.prompt, GREEDY, tokens, allow_repetition=True, strategy=side)
            )
            for side, runner in zip(SIDES, self.runners[:: -1 if swapped else 1], strict=True)
        }
        plain, other = (walks[side] for side in SIDES)
        for turn in count(task.rounds):
            place, passes = len(plain.times) + STRETCH, len(other.passes)
            if turn % 2:
                plain.to(place)
            other.to(place)
            while 0 < len(other.passes) - passes < PASSES and other.answer is None:
                other.to(len(other.times) + 1)
            plain.to(len(other.times))
            if plain.answer or other.answer:
                break
            if tokens > self.asked.tokens or (turn - task.rounds) % 2 == 0:
                width, price = self.ruler.at(len(task.prompt) + len(plain.times))
                task.prices[width].append(price)
        plain.to(tokens)
        for side, walk in walks.items():
            assert walk.answer
            task.answers[side] = walk.answer
            marks = np.linspace(0, len(walk.times) - 1, PARTS + 1)
            task.seconds[side].append(
                np.diff(np.interp(marks, range(len(walk.times)), walk.times)).tolist()
            )
        task.passes += other.passes
        task.rounds += 1

    def use(self, drafters: Iterable[Drafter]) -> None:
        """Use these drafters from now on."""
        for runner in self.runners:
            means = runner.engine.resources
            assert means.speculation
            runner.engine.resources = replace(
                means, speculation=replace(means.speculation, drafters=tuple(drafters))
            )

    def task(self, text: str) -> Task:
        """Return a task with the prompt as `chat` would send it."""
        runner = self.runners[0]
        return Task(
            runner.encode_chat([Message("user", text)])
            if runner.template
            else runner.encode_text(text)
        )


def tasks(folder: Path, number: int) -> tuple[list[str], list[str]]:
    """Return prompts whose answers repeat their input, and free ones."""
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
        ON_LISTS[at // 3 % len(ON_LISTS)].format(lists[at % len(lists)])
        if at % 3 == 2
        else ON_POEMS[at % len(ON_POEMS)].format(poems[at % len(poems)])
        for at in range(number)
    ]
    return leaning, questions[: 4 * number : 4]


def group(bench: Bench, name: str, texts: list[str]) -> None:
    """Measure and print one group of tasks; the worst ones continue until their intervals are
    narrow.
    """
    asked, found = bench.asked, {}
    for number, text in enumerate(texts, 1):
        if asked.only and str(number) not in asked.only.split(","):
            continue
        task = found[number] = bench.task(text)
        while task.rounds < asked.rounds and found.get(number):
            bench.walk(task, asked.tokens)
            if task.tokens < 32:
                print(
                    f"  {name} {number}: {found.pop(number).tokens} tokens are too few to measure"
                )
        if number in found:
            line(name, number, task)
    for number in sorted(found, key=lambda one: found[one].ratio())[
        : asked.worst if name == "free" else 0
    ]:
        task, before = found[number], found[number].rounds
        while task.rounds < asked.most and (
            task.rounds < 2 or np.ptp(task.ratio()[1:]) > 2 * NARROW
        ):
            bench.walk(task, asked.tokens)
        if task.rounds > before:
            line(name, number, task)
    told(name, list(found.values()))


def line(name: str, number: int, task: Task) -> None:
    """Print one task's figures."""
    ratio, low, high = task.ratio()
    print(
        f"  {name} {number}: {task.tokens} tokens, ratio {ratio:.3f} ({low:.3f} to {high:.3f}, {task.rounds} rounds), "
        f"bound {task.bound(curve([task])):.3f}, drafted {task.drafted:.0f}, accepted {task.right:.0f}"
        f"{'' if task.same else ', ANOTHER TEXT'}",
        flush=True,
    )


def told(name: str, found: list[Task]) -> None:
    """Print the figures of a group."""
    if not found:
        raise SystemExit(f"{name}: no answer was long enough to measure")
    prices = curve(found)
    ratios = [task.ratio()[0] for task in found]
    shares = [ratio / task.bound(prices) for ratio, task in zip(ratios, found, strict=True)]
    drafted, right, made = (
        sum(each) for each in zip(*((t.drafted, t.right, t.tokens) for t in found), strict=True)
    )
    print(
        f"{name}: {len(found)} tasks, {sum(task.same for task in found)} with the same text, {made} tokens"
    )
    print(f"  T(m) / T(1) {_rounded(prices)}")
    print(
        f"  ratio    median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
    )
    print(f"  of bound median {statistics.median(shares):.3f}, least {min(shares):.3f}")
    share = right / max(1, drafted)
    print(
        f"  drafted  {drafted:.0f}, accepted {right:.0f} ({share:.0%}), {right / made:.0%} of the text",
        flush=True,
    )


def _rounded(prices: dict[int, float]) -> str:
    return ", ".join(f"{rows}: {price:.2f}" for rows, price in prices.items())


def known(bench: Bench, texts: list[str]) -> None:
    """Measure acceptance 0.95 with a drafter that has the answers."""
    asked, found = bench.asked, []
    for number, text in enumerate(texts, 1):
        task = bench.task(text)
        plain = Walk(
            bench.runners[0], Request(task.prompt, GREEDY, 2 * asked.tokens, allow_repetition=True)
        )
        plain.to(2 * asked.tokens)
        assert plain.answer
        if len(plain.answer.tokens) < 64:
            continue
        ids, n_vocab = [token.id for token in plain.answer.tokens], bench.runners[0].model.n_vocab
        # each task has its own random seed
        bench.use([Knowing(ids, RIGHT, n_vocab=n_vocab, seed=number)])
        for _ in range(max(2, asked.rounds // 2)):
            bench.walk(task, 2 * asked.tokens)
        found.append(task)
        line("known", number, task)
    told("known", found)
    prices = curve(found)
    passes = [each for task in found for each in task.passes]
    right = sum(right for _, right in passes)
    met = right / (right + sum(right < drafted for drafted, right in passes))
    ratios = [task.ratio()[0] for task in found]
    for name, chance in (("asked", RIGHT), ("met", met)):
        most = max((1 - chance**width) / (1 - chance) / prices[width] for width in PASS_ROWS)
        shares = [ratio / most for ratio in ratios]
        print(
            f"  acceptance {name} {chance:.3f}: bound {most:.3f}, of the bound "
            f"median {statistics.median(shares):.3f}, from {min(shares):.3f} to {max(shares):.3f}"
        )


@contextmanager
def opened(asked: argparse.Namespace) -> Iterator[tuple[Bench, Speculation]]:
    """Open the model with three contexts."""
    options = RunOptions(
        ctx_size=1024, threads=asked.threads, cache_type_k=asked.cache, cache_type_v=asked.cache
    )
    plain = ContextOptions(
        1024,
        2048,
        512,
        1,
        asked.threads,
        asked.threads,
        asked.cache,
        asked.cache,
        n_outputs=PASS_ROWS[-1],
    )
    with (
        open_runner(asked.model, options, drafting=DraftSettings("on", asked.draft)) as runner,
        open_context(runner.model, plain) as second,
        open_context(runner.model, plain) as third,
    ):
        found = runner.engine.resources.speculation
        assert found, (
            "speculation cannot pay on this machine: no pass of several rows is cheaper than separate passes"
        )
        other = Runner(
            OpenedParts(
                header=runner.header,
                model=runner.model,
                context=second,
                options=options,
                template=runner.template,
                load_ms=0.0,
                native_sampling=True,
                speculation=found,
                ngram_draft="on",
            )
        )
        yield Bench([runner, other], Ruler(third), asked), found


def main() -> None:
    """Measure and print."""
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
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    with opened(asked) as (bench, found):
        one, prices = found.pass_cost.single_seconds * 1e3, _rounded(found.pass_cost.ratios)
        print(
            f"at start-up: T(1) {one:.2f} ms, T(m) / T(1) {prices}, equal rows up to {found.pass_cost.exact_rows}"
        )
        leaning, free = tasks(asked.prompts, asked.tasks)
        for name in asked.groups.split(","):
            bench.use(found.drafters[-1:])
            if name == "known":
                known(bench, free)
            else:
                group(bench, name, {"leaning": leaning, "free": free}[name])


if __name__ == "__main__":
    main()
