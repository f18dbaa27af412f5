"""The fastest settings of a model on a machine, within a time that is given.

One option after the other: threads, threads of a prompt, micro-batch, mode of attention. Each is a
successive halving (Jamieson and Talwalkar 2016) among its values: all of them in a round, in random
order, beside what has been best so far; the slower half leaves, and what is left of the time goes
to the others. A value is taken only if its rounds show that it earns its place. What comes of it is
then compared with the defaults anew, in pairs (paired.py): the best of many measurements is also
the luckiest. It knows nothing of llama.cpp.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Protocol

from llmcli.bench.statistics.paired_test import Comparison, Design, compare, judge
from llmcli.errors import UserError

# What is to be fast: tokens of a prompt, and generated ones, whose time together counts.
OBJECTIVES = {"chat": (512, 128), "prompts": (2048, 0), "answers": (0, 128)}
SIZES = (
    (2048, 1024, 512, 256, 128, 64),
    (32, 16, 8),
)  # tokens of each that one measurement may take
SEARCH = 0.5  # share of the time for the search; the rest is for the comparison
FEWEST, MOST = 6, 20  # rounds of the last two of a search, rounds between two halvings
EARN = Design(
    confidence=0.9, allowance=0.01
)  # a value is worth a change if it brings more than 1 %
FINAL = Design(precision=0.005, least=10)
Clock = Callable[[], float]
Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is run; `cache` is the type of K and V."""

    threads: int
    threads_batch: int
    ubatch: int = 512
    flash: str = "auto"
    cache: str = "f16"


@dataclass(frozen=True, slots=True)
class Space:
    """The values that are tried; `modes` are flash attention and cache type together."""

    threads: Sequence[int]
    ubatches: Sequence[int]
    modes: Sequence[tuple[str, str]]


class Trial(Protocol):
    """Measures one setting at a time, in seconds; before each measurement `settling` of them may
    pass. Generated tokens come `behind` so many of a prompt: attention is a part of what they take,
    and the modes differ in it.
    """

    settling: float

    def pace(self, setting: Setting) -> tuple[float, float]:
        """About what a token of a prompt and a generated one take."""
        ...

    def prompt(self, setting: Setting, tokens: int) -> float: ...

    def decode(self, setting: Setting, tokens: int, behind: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Work:
    """One measurement's tokens, prompt and generated; those `wanted` by the objective; the
    defaults' `pace`, in seconds a token of each; the seconds before each part; the tokens that the
    generated ones come `behind`.
    """

    tokens: tuple[int, int]
    wanted: tuple[int, int]
    pace: tuple[float, float]
    settling: float = 0.0
    behind: int = 0

    def part(self, index: int) -> "Work":
        """The prompt (0) or the generation (1) alone."""
        tokens, wanted = ([0, 0], [0, 0])
        tokens[index], wanted[index] = self.tokens[index], self.wanted[index]
        return replace(self, tokens=(tokens[0], tokens[1]), wanted=(wanted[0], wanted[1]))

    @property
    def seconds(self) -> float:
        """About what one measurement takes with the defaults."""
        parts = zip(self.tokens, self.pace, strict=True)
        return sum(count * each + self.settling for count, each in parts if count)

    def rate(self, trial: Trial, setting: Setting, tick: Tick) -> float:
        """Measure how often a second a setting does what is wanted."""
        spent = 0.0
        prompt, generated = self.tokens
        if prompt:
            spent += self.wanted[0] / prompt * trial.prompt(setting, prompt)
            tick()
        if generated:
            spent += self.wanted[1] / generated * trial.decode(setting, generated, self.behind)
            tick()
        return 1 / spent


@dataclass(frozen=True, slots=True)
class Tried:
    """One value of an `option`, beside what was best before: how many times its speed, and in how
    many rounds.
    """

    option: str
    setting: Setting
    ratio: float
    rounds: int
    taken: bool


@dataclass(frozen=True, slots=True)
class Found:
    """`best` is what the search found, `comparison` how fast it is in units of the defaults, None
    where it is they.
    """

    default: Setting
    best: Setting
    tried: tuple[Tried, ...]
    work: Work
    seconds: float
    comparison: Comparison | None

    @property
    def faster(self) -> bool:
        """Whether the noise supports that it is faster than the defaults."""
        return self.comparison is not None and self.comparison.low > 1

    @property
    def setting(self) -> Setting:
        """What to run the model with."""
        return self.best if self.faster else self.default


@dataclass(frozen=True, slots=True)
class Board:
    """The search for one option: its values as settings made of the best so far, and the work it
    matters for.
    """

    option: str
    values: Callable[[Setting], Sequence[Setting]]
    work: Work

    def cost(self, setting: Setting) -> float:
        """About the seconds of the fewest rounds; with fewer threads they take longer."""
        values = self.values(setting)
        slower = [
            max(1.0, setting.threads / one.threads, setting.threads_batch / one.threads_batch)
            for one in values
        ]
        return (
            self.work.seconds * (2 * sum(slower) + FEWEST + math.log2(2 + len(values)))
            if values
            else 0.0
        )


def threads(cores: int, cpus: int) -> list[int]:
    """The numbers of threads worth trying: the cores, every hardware thread, half, three quarters;
    few cores: one.
    """
    return sorted({cores, cpus, -(-cores // 2), -(-3 * cores // 4), *([1] if cores <= 4 else [])})


def find(
    trial: Trial,
    space: Space,
    default: Setting,
    objective: str,
    seconds: float,
    *,
    clock: Clock = time.monotonic,
    tick: Tick = lambda: None,
    coin: random.Random | None = None,
) -> Found:
    """Search for the fastest setting; raises UserError where the time is too short for this model.

    `tick` is called after each measurement.
    """
    coin = coin or random.Random()
    began = clock()
    wanted = Work((0, 0), OBJECTIVES[objective], trial.pace(default), trial.settling)
    work = _sized(wanted, space, default, seconds)
    boards = [
        board for board in _boards(space, work) if board.work.seconds and board.values(default)
    ]
    best = default
    tried: list[Tried] = []
    for index, board in enumerate(boards):
        share = board.cost(best) / sum(one.cost(best) for one in boards[index:])
        deadline = clock() + (SEARCH * seconds - (clock() - began)) * share
        found = halve(
            partial(board.work.rate, trial, tick=tick),
            best,
            board.values(best),
            deadline,
            clock,
            coin,
        )
        best, told = _taken(board.option, best, found)
        tried += told
    comparison = None
    if best != default:
        sides = [partial(work.rate, trial, one, tick) for one in (default, best)]
        design = replace(FINAL, seconds=max(1.0, seconds - (clock() - began)))
        comparison = compare(sides[0], sides[1], design, clock=clock, coin=coin)
    return Found(default, best, tuple(tried), work, clock() - began, comparison)


def halve(
    rate: Callable[[Setting], float],
    before: Setting,
    values: Sequence[Setting],
    deadline: float,
    clock: Clock,
    coin: random.Random,
) -> dict[Setting, list[tuple[float, float]]]:
    """Rounds of `values` beside `before`; the slower half of them leaves at each of equal parts of
    the time.

    For each value its pairs of rates, `before`'s first; the last that is left has at least FEWEST.
    """
    rates: dict[Setting, list[tuple[float, float]]] = {one: [] for one in values}
    left, began = list(values), clock()
    rungs = len(left).bit_length()
    for rung in range(1, rungs + 1):
        for _ in range(MOST):
            started = clock()
            found = {one: rate(one) for one in coin.sample([before, *left], len(left) + 1)}
            for one in left:
                rates[one].append((found[before], found[one]))
            over = 2 * clock() - started > began + (deadline - began) * rung / rungs
            if over and (rung < rungs or len(rates[left[0]]) >= FEWEST):
                break
        if rung < rungs:
            left = sorted(left, key=lambda one: -_gain(rates[one]))[: len(left) // 2]
    return rates


def _gain(pairs: Sequence[tuple[float, float]]) -> float:
    """The logarithm of how many times the speed before."""
    return statistics.median(math.log(after / before) for before, after in pairs)


def _taken(
    option: str, before: Setting, found: dict[Setting, list[tuple[float, float]]]
) -> tuple[Setting, list[Tried]]:
    """The value that was left at the end, if its rounds show that it earns the change; and what was
    tried.
    """
    last = max(found, key=lambda one: (len(found[one]), _gain(found[one])))
    old, new = zip(*found[last], strict=True)
    verdict = judge(old, new, EARN)
    chosen = last if verdict is not None and verdict.low > 1 else before
    tried = [
        Tried(option, one, math.exp(_gain(pairs)), len(pairs), one == chosen)
        for one, pairs in found.items()
    ]
    return chosen, sorted(tried, key=lambda one: -one.ratio)


def _boards(space: Space, work: Work) -> list[Board]:
    prompt, decode = work.part(0), work.part(1)

    def ubatches(best: Setting) -> list[Setting]:
        # One that is longer than what is computed at once is as good as any other such.
        sizes = [size for size in space.ubatches if size <= prompt.tokens[0] or size <= best.ubatch]
        alike = min(best.ubatch, prompt.tokens[0])
        return [
            replace(best, ubatch=size) for size in sizes if min(size, prompt.tokens[0]) != alike
        ]

    return [
        Board(
            "threads",
            lambda best: [replace(best, threads=n) for n in space.threads if n != best.threads],
            decode,
        ),
        Board(
            "threads_batch",
            lambda best: [
                replace(best, threads_batch=n) for n in space.threads if n != best.threads_batch
            ],
            prompt,
        ),
        Board("ubatch", ubatches, prompt),
        Board(
            "mode",
            lambda best: [
                replace(best, flash=flash, cache=cache)
                for flash, cache in space.modes
                if (flash, cache) != (best.flash, best.cache)
            ],
            work,
        ),
    ]


def _sized(wanted: Work, space: Space, default: Setting, seconds: float) -> Work:
    """The longest measurements with which there is time for searching and comparing; raises
    UserError.
    """
    least = math.inf
    sizes = (
        [size for size in known if size <= most] or [0]
        for known, most in zip(SIZES, wanted.wanted, strict=True)
    )
    for prompt, generated in product(*sizes):
        work = replace(wanted, tokens=(prompt, generated), behind=prompt)
        search = sum(board.cost(default) for board in _boards(space, work))
        needed = max(search / SEARCH, 2 * FINAL.least * work.seconds / (1 - SEARCH))
        if needed <= seconds:
            return work
        least = min(least, needed)
    raise UserError(
        f"{seconds:.0f} seconds are too few to compare anything with this model",
        hint=f"--budget {math.ceil(least)}",
    )
