"""Search for the fastest settings of a model on a machine within a time budget.

The options are searched one after another: threads, prompt threads, micro-batch, and attention
mode. Each is a successive halving (Jamieson and Talwalkar 2016) of its values: every round measures
all remaining values and the best setting so far in random order; then the slower half is dropped. A
value is adopted only if its rounds show a sufficient gain. The result is compared with the defaults
again in pairs, because the best of many measurements is also the luckiest.
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

# prompt tokens and generated tokens whose total time is minimized
OBJECTIVES = {"chat": (512, 128), "prompts": (2048, 0), "answers": (0, 128)}
# lengths of a measurement: prompt tokens, generated tokens
SIZES = ((2048, 1024, 512, 256, 128, 64), (32, 16, 8))
SEARCH = 0.5  # share of the time for the search; the rest is for the final comparison
FEWEST, MOST = 6, 20  # minimum rounds of the last two values, maximum rounds between two halvings
EARN = Design(confidence=0.9, allowance=0.01)  # a value is adopted if it gains more than 1 %
FINAL = Design(precision=0.005, least=10)
Clock = Callable[[], float]
Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is run. `cache`: the type of K and V."""

    threads: int
    threads_batch: int
    ubatch: int = 512
    flash: str = "auto"
    cache: str = "f16"


@dataclass(frozen=True, slots=True)
class Space:
    """The values to try. `modes`: combinations of flash attention and cache type."""

    threads: Sequence[int]
    ubatches: Sequence[int]
    modes: Sequence[tuple[str, str]]


class Trial(Protocol):
    """Times one setting at a time.

    `settling`: seconds that may pass before each measurement. Generated tokens come after a prompt
    of `depth` tokens, because attention, which the modes change, grows with the depth.
    """

    settling: float

    def pace(self, setting: Setting) -> tuple[float, float]:
        """Return the approximate seconds of a prompt token and of a generated token."""
        ...

    def prompt(self, setting: Setting, tokens: int) -> float:
        """Return the seconds of a prompt of `tokens` tokens."""
        ...

    def decode(self, setting: Setting, tokens: int, behind: int) -> float:
        """Return the seconds of generating `tokens` tokens after a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """The tokens of one measurement.

    `tokens`: measured prompt and generated tokens. `objective_tokens`: those of the objective.
    `pace`: seconds per prompt and generated token with the default settings. `settling`: seconds
    before each phase. `depth`: prompt tokens before the generated ones.
    """

    tokens: tuple[int, int]
    wanted: tuple[int, int]
    pace: tuple[float, float]
    settling: float = 0.0
    behind: int = 0

    def part(self, index: int) -> "Work":
        """Return the workload of the prompt (0) or of the generation (1) alone."""
        tokens, wanted = ([0, 0], [0, 0])
        tokens[index], wanted[index] = self.tokens[index], self.wanted[index]
        return replace(self, tokens=(tokens[0], tokens[1]), wanted=(wanted[0], wanted[1]))

    @property
    def seconds(self) -> float:
        """The approximate seconds of one measurement with the default settings."""
        parts = zip(self.tokens, self.pace, strict=True)
        return sum(count * each + self.settling for count, each in parts if count)

    def rate(self, trial: Trial, setting: Setting, tick: Tick) -> float:
        """Measure how many times per second a setting completes the objective."""
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
    """One tried value of an option: its speed relative to the best setting before, and the number
    of rounds.
    """

    option: str
    setting: Setting
    ratio: float
    rounds: int
    taken: bool


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search. `comparison`: the speed of `best` relative to the defaults, None if
    `best` is the default setting.
    """

    default: Setting
    best: Setting
    tried: tuple[Tried, ...]
    work: Work
    seconds: float
    comparison: Comparison | None

    @property
    def faster(self) -> bool:
        """Whether `best` is significantly faster than the defaults."""
        return self.comparison is not None and self.comparison.low > 1

    @property
    def setting(self) -> Setting:
        """The setting to use: `best` if it is faster, otherwise the default."""
        return self.best if self.faster else self.default


@dataclass(frozen=True, slots=True)
class Board:
    """The search of one option: its values, applied to the best setting so far, and the workload
    that it affects.
    """

    option: str
    values: Callable[[Setting], Sequence[Setting]]
    work: Work

    def cost(self, setting: Setting) -> float:
        """Return the approximate seconds of the minimum rounds. Settings with fewer threads take
        longer.
        """
        values = self.values(setting)
        slower = [
            max(1.0, setting.threads / value.threads, setting.threads_batch / value.threads_batch)
            for value in values
        ]
        return (
            self.work.seconds * (2 * sum(slower) + FEWEST + math.log2(2 + len(values)))
            if values
            else 0.0
        )


def threads(cores: int, cpus: int) -> list[int]:
    """Return the numbers of threads to try: cores, CPUs, a half, three quarters, and one if there
    are at most four cores.
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
    """Search for the fastest setting. Raises UserError if the time is too short for this model.

    `tick` is called after each measurement.
    """
    coin = coin or random.Random()
    began = clock()
    objective_work = Work((0, 0), OBJECTIVES[objective], trial.pace(default), trial.settling)
    work = _sized(objective_work, space, default, seconds)
    boards = [
        board for board in _boards(space, work) if board.work.seconds and board.values(default)
    ]
    best = default
    tried: list[Tried] = []
    for index, board in enumerate(boards):
        time_share = board.cost(best) / sum(setting.cost(best) for setting in boards[index:])
        deadline = clock() + (SEARCH * seconds - (clock() - began)) * time_share
        rates = halve(
            partial(board.work.rate, trial, tick=tick),
            best,
            board.values(best),
            deadline,
            clock,
            coin,
        )
        best, tried_values = _taken(board.option, best, rates)
        tried += tried_values
    comparison = None
    if best != default:
        sides = [partial(work.rate, trial, setting, tick) for setting in (default, best)]
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
    """Measure rounds of `values` together with `best`, and drop the slower half at equal intervals
    until `deadline`.

    Returns pairs of rates for each value, the rate of `best` first. The last remaining value has at
    least MIN_ROUNDS pairs.
    """
    rates: dict[Setting, list[tuple[float, float]]] = {value: [] for value in values}
    remaining, began = list(values), clock()
    rungs = len(remaining).bit_length()
    for rung in range(1, rungs + 1):
        for _ in range(MOST):
            started = clock()
            round_rates = {
                value: rate(value)
                for value in coin.sample([before, *remaining], len(remaining) + 1)
            }
            for value in remaining:
                rates[value].append((round_rates[before], round_rates[value]))
            over = 2 * clock() - started > began + (deadline - began) * rung / rungs
            if over and (rung < rungs or len(rates[remaining[0]]) >= FEWEST):
                break
        if rung < rungs:
            remaining = sorted(remaining, key=lambda value: -_gain(rates[value]))[
                : len(remaining) // 2
            ]
    return rates


def _gain(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the logarithm of the median speed ratio."""
    return statistics.median(math.log(after / before) for before, after in pairs)


def _taken(
    option: str, before: Setting, rates: dict[Setting, list[tuple[float, float]]]
) -> tuple[Setting, list[Tried]]:
    """Return the last remaining value if its gain is sufficient, otherwise the previous setting,
    and all tried values.
    """
    survivor = max(rates, key=lambda value: (len(rates[value]), _gain(rates[value])))
    old, new = zip(*rates[survivor], strict=True)
    verdict = judge(old, new, EARN)
    adopted = survivor if verdict is not None and verdict.low > 1 else before
    tried = [
        Tried(option, value, math.exp(_gain(pairs)), len(pairs), value == adopted)
        for value, pairs in rates.items()
    ]
    return adopted, sorted(tried, key=lambda value: -value.ratio)


def _boards(space: Space, work: Work) -> list[Board]:
    prompt, decode = work.part(0), work.part(1)

    def ubatches(best: Setting) -> list[Setting]:
        # All sizes that cover the whole measured prompt behave the same.
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
    """Return the workload with the longest measurements for which the time suffices. Raises
    UserError.
    """
    least = math.inf
    sizes = (
        [size for size in lengths if size <= most] or [0]
        for lengths, most in zip(SIZES, wanted.wanted, strict=True)
    )
    for prompt, generated in product(*sizes):
        work = replace(wanted, tokens=(prompt, generated), behind=prompt)
        search_seconds = sum(board.cost(default) for board in _boards(space, work))
        needed = max(search_seconds / SEARCH, 2 * FINAL.least * work.seconds / (1 - SEARCH))
        if needed <= seconds:
            return work
        least = min(least, needed)
    raise UserError(
        f"{seconds:.0f} seconds are too short to compare settings of this model",
        hint=f"--budget {math.ceil(least)}",
    )
