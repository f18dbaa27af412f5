"""Search for the fastest settings of a model on a machine, within a given time.

The options are searched one after another: threads, prompt threads, micro-batch and attention mode.
The values of an option are searched by successive halving (Jamieson and Talwalkar 2016): in each
round, all remaining values and the best setting so far are measured in random order. At times, the
slower half of the values is dropped. A value is adopted only if its rounds show a sufficient gain.

Finally, the result is compared with the defaults in new pairs of measurements. This is necessary
because the best of many measurements is also the luckiest one.
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

from llmcli.bench.statistics.paired_test import Comparison, Design, compare_pairs, estimate_ratio
from llmcli.errors import UserError

# for each objective, the prompt tokens and generated tokens whose total time is minimized
OBJECTIVES = {"chat": (512, 128), "prompts": (2048, 0), "answers": (0, 128)}
# possible lengths of a measurement, longest first: prompt tokens, generated tokens
SAMPLE_TOKENS = ((2048, 1024, 512, 256, 128, 64), (32, 16, 8))
# fraction of the time for the search; the final comparison gets the remaining time
SEARCH_SHARE = 0.5
MIN_ROUNDS, MAX_ROUNDS = (
    6,
    20,
)  # minimum rounds for the last two values, maximum rounds between two halvings
MIN_GAIN_DESIGN = Design(
    confidence=0.9, allowance=0.01
)  # a value is adopted if it gains more than 1 %
FINAL_DESIGN = Design(precision=0.005, min_pairs=10)
Clock = Callable[[], float]
Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class RunSetting:
    """A setting of all searched options. `flash`: flash attention. `cache`: the type of K and V."""

    threads: int
    threads_batch: int
    ubatch: int = 512
    flash: str = "auto"
    cache: str = "f16"


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The values to try for each option. `modes`: attention modes, each a setting of flash
    attention and a cache type.
    """

    threads: Sequence[int]
    ubatches: Sequence[int]
    modes: Sequence[tuple[str, str]]


class TuningTrial(Protocol):
    """Measures the time of prompts and generations with a setting.

    `settling`: seconds that each measurement may take before its clock starts. Generated tokens
    follow a prompt of `depth` tokens: attention takes longer with depth, and the attention modes
    differ in its speed.
    """

    settling: float

    def estimate_pace(self, setting: RunSetting) -> tuple[float, float]:
        """Return the approximate seconds of a prompt token and of a generated token."""
        ...

    def time_prompt(self, setting: RunSetting, tokens: int) -> float:
        """Return the seconds of a prompt of `tokens` tokens."""
        ...

    def time_decode(self, setting: RunSetting, tokens: int, depth: int) -> float:
        """Return the seconds of generating `tokens` tokens after a prompt of `depth` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class TuningWorkload:
    """The size of one measurement. Each pair of numbers is for the prompt and for the generated
    tokens.

    `tokens`: tokens to measure. `objective_tokens`: tokens of the objective. `pace`: seconds per
    token with the default settings. `settling`: seconds before the clock starts, for the prompt and
    for the generation alike. `depth`: prompt tokens before the generated ones.
    """

    tokens: tuple[int, int]
    objective_tokens: tuple[int, int]
    pace: tuple[float, float]
    settling: float = 0.0
    depth: int = 0

    def single_phase(self, phase: int) -> "TuningWorkload":
        """Return the same workload with only its prompt (phase 0) or only its generation (phase 1)."""
        tokens, wanted = ([0, 0], [0, 0])
        tokens[phase], wanted[phase] = self.tokens[phase], self.objective_tokens[phase]
        return replace(self, tokens=(tokens[0], tokens[1]), objective_tokens=(wanted[0], wanted[1]))

    @property
    def seconds(self) -> float:
        """The approximate seconds of one measurement with the default settings."""
        parts = zip(self.tokens, self.pace, strict=True)
        return sum(count * each + self.settling for count, each in parts if count)

    def measure_rate(self, trial: TuningTrial, setting: RunSetting, tick: Tick) -> float:
        """Measure a setting, and return how many times per second it would complete the objective."""
        spent = 0.0
        prompt, generated = self.tokens
        if prompt:
            spent += self.objective_tokens[0] / prompt * trial.time_prompt(setting, prompt)
            tick()
        if generated:
            spent += (
                self.objective_tokens[1]
                / generated
                * trial.time_decode(setting, generated, self.depth)
            )
            tick()
        return 1 / spent


@dataclass(frozen=True, slots=True)
class TriedSetting:
    """One value of an option that was tried: its speed relative to the best setting before, and in
    how many rounds it was measured.
    """

    option: str
    setting: RunSetting
    ratio: float
    rounds: int
    taken: bool


@dataclass(frozen=True, slots=True)
class TuningResult:
    """The result of a search. `comparison`: the final comparison of `best` with the defaults; None
    if `best` is the default setting.
    """

    default: RunSetting
    best: RunSetting
    tried: tuple[TriedSetting, ...]
    workload: TuningWorkload
    seconds: float
    comparison: Comparison | None

    @property
    def is_faster(self) -> bool:
        """Whether the final comparison shows that `best` is faster than the defaults."""
        return self.comparison is not None and self.comparison.low > 1

    @property
    def setting(self) -> RunSetting:
        """The setting to use: `best` if it is certainly faster, otherwise the default."""
        return self.best if self.is_faster else self.default


@dataclass(frozen=True, slots=True)
class TuningRound:
    """The search of one option. `values`: returns the settings to try, which differ from the best
    setting so far in this option. `workload`: the measurement that the option affects.
    """

    option: str
    values: Callable[[RunSetting], Sequence[RunSetting]]
    workload: TuningWorkload

    def cost(self, setting: RunSetting) -> float:
        """Return the approximate seconds of the minimum number of rounds. Settings with fewer
        threads are assumed to take longer.
        """
        values = self.values(setting)
        slower = [
            max(1.0, setting.threads / value.threads, setting.threads_batch / value.threads_batch)
            for value in values
        ]
        return (
            self.workload.seconds * (2 * sum(slower) + MIN_ROUNDS + math.log2(2 + len(values)))
            if values
            else 0.0
        )


def thread_counts(cores: int, cpus: int) -> list[int]:
    """Return the numbers of threads to try: all cores, all CPUs, half of the cores, three quarters
    of the cores, and one if there are at most four cores.
    """
    return sorted({cores, cpus, -(-cores // 2), -(-3 * cores // 4), *([1] if cores <= 4 else [])})


def tune_settings(
    trial: TuningTrial,
    space: SearchSpace,
    default: RunSetting,
    objective: str,
    seconds: float,
    *,
    clock: Clock = time.monotonic,
    tick: Tick = lambda: None,
    coin: random.Random | None = None,
) -> TuningResult:
    """Search for the fastest setting. Raises UserError if the time is too short for this model.

    `objective`: a key of OBJECTIVES. `seconds`: the time for search and final comparison. `tick` is
    called after each measurement.
    """
    coin = coin or random.Random()
    began = clock()
    objective_work = TuningWorkload(
        (0, 0), OBJECTIVES[objective], trial.estimate_pace(default), trial.settling
    )
    work = _sized(objective_work, space, default, seconds)
    boards = [
        board for board in _boards(space, work) if board.workload.seconds and board.values(default)
    ]
    best = default
    tried: list[TriedSetting] = []
    for index, board in enumerate(boards):
        time_share = board.cost(best) / sum(setting.cost(best) for setting in boards[index:])
        deadline = clock() + (SEARCH_SHARE * seconds - (clock() - began)) * time_share
        rates = halve_values(
            partial(board.workload.measure_rate, trial, tick=tick),
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
        sides = [partial(work.measure_rate, trial, setting, tick) for setting in (default, best)]
        design = replace(FINAL_DESIGN, seconds=max(1.0, seconds - (clock() - began)))
        comparison = compare_pairs(sides[0], sides[1], design, clock=clock, coin=coin)
    return TuningResult(default, best, tuple(tried), work, clock() - began, comparison)


def halve_values(
    rate: Callable[[RunSetting], float],
    best: RunSetting,
    values: Sequence[RunSetting],
    deadline: float,
    clock: Clock,
    coin: random.Random,
) -> dict[RunSetting, list[tuple[float, float]]]:
    """Measure `values` and `best` in rounds until `deadline`. The slower half of the values is
    dropped at equal intervals, until one is left.

    Returns a list of pairs for each value: in each round, the rate of `best` and the rate of the
    value. The last value has at least MIN_ROUNDS pairs.
    """
    rates: dict[RunSetting, list[tuple[float, float]]] = {value: [] for value in values}
    remaining, began = list(values), clock()
    rungs = len(remaining).bit_length()
    for rung in range(1, rungs + 1):
        for _ in range(MAX_ROUNDS):
            started = clock()
            round_rates = {
                value: rate(value) for value in coin.sample([best, *remaining], len(remaining) + 1)
            }
            for value in remaining:
                rates[value].append((round_rates[best], round_rates[value]))
            over = 2 * clock() - started > began + (deadline - began) * rung / rungs
            if over and (rung < rungs or len(rates[remaining[0]]) >= MIN_ROUNDS):
                break
        if rung < rungs:
            remaining = sorted(remaining, key=lambda value: -_gain(rates[value]))[
                : len(remaining) // 2
            ]
    return rates


def _gain(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the median gain of a value as the logarithm of its speed ratio."""
    return statistics.median(math.log(after / before) for before, after in pairs)


def _taken(
    option: str, before: RunSetting, rates: dict[RunSetting, list[tuple[float, float]]]
) -> tuple[RunSetting, list[TriedSetting]]:
    """Return the new best setting, and all tried values. The new best setting is the last remaining
    value if its gain is sufficient, otherwise the setting before.
    """
    survivor = max(rates, key=lambda value: (len(rates[value]), _gain(rates[value])))
    old, new = zip(*rates[survivor], strict=True)
    verdict = estimate_ratio(old, new, MIN_GAIN_DESIGN)
    adopted = survivor if verdict is not None and verdict.low > 1 else before
    tried = [
        TriedSetting(option, value, math.exp(_gain(pairs)), len(pairs), value == adopted)
        for value, pairs in rates.items()
    ]
    return adopted, sorted(tried, key=lambda value: -value.ratio)


def _boards(space: SearchSpace, work: TuningWorkload) -> list[TuningRound]:
    prompt, decode = work.single_phase(0), work.single_phase(1)

    def ubatches(best: RunSetting) -> list[RunSetting]:
        # Sizes at least as large as the measured prompt all behave the same, so try only one of
        # them.
        sizes = [size for size in space.ubatches if size <= prompt.tokens[0] or size <= best.ubatch]
        alike = min(best.ubatch, prompt.tokens[0])
        return [
            replace(best, ubatch=size) for size in sizes if min(size, prompt.tokens[0]) != alike
        ]

    return [
        TuningRound(
            "threads",
            lambda best: [replace(best, threads=n) for n in space.threads if n != best.threads],
            decode,
        ),
        TuningRound(
            "threads_batch",
            lambda best: [
                replace(best, threads_batch=n) for n in space.threads if n != best.threads_batch
            ],
            prompt,
        ),
        TuningRound("ubatch", ubatches, prompt),
        TuningRound(
            "mode",
            lambda best: [
                replace(best, flash=flash, cache=cache)
                for flash, cache in space.modes
                if (flash, cache) != (best.flash, best.cache)
            ],
            work,
        ),
    ]


def _sized(
    wanted: TuningWorkload, space: SearchSpace, default: RunSetting, seconds: float
) -> TuningWorkload:
    """Return the workload with the longest measurements that the time allows. Raises UserError if
    it is too short for the shortest ones.
    """
    least = math.inf
    sizes = (
        [size for size in lengths if size <= most] or [0]
        for lengths, most in zip(SAMPLE_TOKENS, wanted.objective_tokens, strict=True)
    )
    for prompt, generated in product(*sizes):
        work = replace(wanted, tokens=(prompt, generated), depth=prompt)
        search_seconds = sum(board.cost(default) for board in _boards(space, work))
        needed = max(
            search_seconds / SEARCH_SHARE,
            2 * FINAL_DESIGN.min_pairs * work.seconds / (1 - SEARCH_SHARE),
        )
        if needed <= seconds:
            return work
        least = min(least, needed)
    raise UserError(
        f"{seconds:.0f} seconds are too short to compare settings of this model",
        hint=f"--budget {math.ceil(least)}",
    )
