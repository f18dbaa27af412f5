"""Search for the fastest settings of a model on a machine, within a given time.

The options are searched one after another: threads, prompt threads, micro-batch size and attention
mode. The values of an option are searched by successive halving (Jamieson and Talwalkar 2016). Each
round measures all remaining values and the best setting so far in random order, and at equal
intervals the slower half of the values is dropped. A value is adopted only if its rounds show a
sufficient gain.

Finally, the result is compared with the default settings in new pairs of measurements, because the
best of many noisy measurements partly owes its rank to chance.
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
# minimum rounds of the last value, maximum rounds between two halvings
MIN_ROUNDS, MAX_ROUNDS = 6, 20
# a value is adopted if it gains more than 1 %
MIN_GAIN_DESIGN = Design(confidence=0.9, allowance=0.01)
FINAL_DESIGN = Design(precision=0.005, min_pairs=10)
Clock = Callable[[], float]
Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class RunSetting:
    """One value for each of the searched options. `flash`: flash attention. `cache`: the type of K
    and V.
    """

    threads: int
    threads_batch: int
    ubatch: int = 512
    flash: str = "auto"
    cache: str = "f16"


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The values to try for each option. `modes`: attention modes, each a pair of a flash attention
    setting and a cache type.
    """

    threads: Sequence[int]
    ubatches: Sequence[int]
    modes: Sequence[tuple[str, str]]


class TuningTrial(Protocol):
    """Measures the time of prompts and generations with a setting.

    `settling`: the seconds that a measurement may compute before its clock starts. Generated tokens
    follow a prompt of `depth` tokens, because the attention modes differ in speed only at depth.
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
    """What one measurement computes. Each pair of numbers is for the prompt and for the generated
    tokens.

    `tokens`: measured tokens. `objective_tokens`: tokens of the objective, to which the measured
    times are extrapolated. `pace`: seconds per token with the default settings. `settling`: seconds
    before the clock starts, once for the prompt and once for the generation. `depth`: prompt tokens
    before the generated tokens.
    """

    tokens: tuple[int, int]
    objective_tokens: tuple[int, int]
    pace: tuple[float, float]
    settling: float = 0.0
    depth: int = 0

    def single_phase(self, phase: int) -> "TuningWorkload":
        """Return this workload with only its prompt (phase 0) or only its generation (phase 1)."""
        tokens, objective_tokens = ([0, 0], [0, 0])
        tokens[phase], objective_tokens[phase] = self.tokens[phase], self.objective_tokens[phase]
        return replace(
            self,
            tokens=(tokens[0], tokens[1]),
            objective_tokens=(objective_tokens[0], objective_tokens[1]),
        )

    @property
    def seconds(self) -> float:
        """The approximate seconds of one measurement with the default settings."""
        parts = zip(self.tokens, self.pace, strict=True)
        return sum(count * each + self.settling for count, each in parts if count)

    def measure_rate(self, trial: TuningTrial, setting: RunSetting, tick: Tick) -> float:
        """Measure a setting, and return how many times per second it would complete the objective.
        `tick` is called after each measurement.
        """
        seconds = 0.0
        prompt, generated = self.tokens
        if prompt:
            seconds += self.objective_tokens[0] / prompt * trial.time_prompt(setting, prompt)
            tick()
        if generated:
            seconds += (
                self.objective_tokens[1]
                / generated
                * trial.time_decode(setting, generated, self.depth)
            )
            tick()
        return 1 / seconds


@dataclass(frozen=True, slots=True)
class TriedSetting:
    """One tried value of an option. `ratio`: its speed relative to the best setting before.
    `rounds`: the number of rounds in which it was measured. `taken`: whether it became the best
    setting.
    """

    option: str
    setting: RunSetting
    ratio: float
    rounds: int
    taken: bool


@dataclass(frozen=True, slots=True)
class TuningResult:
    """The result of a search. `comparison`: the final comparison of `best` with the default
    setting; None if `best` is the default setting.
    """

    default: RunSetting
    best: RunSetting
    tried: tuple[TriedSetting, ...]
    workload: TuningWorkload
    seconds: float
    comparison: Comparison | None

    @property
    def is_faster(self) -> bool:
        """Whether the final comparison shows that `best` is faster than the default setting."""
        return self.comparison is not None and self.comparison.low > 1

    @property
    def setting(self) -> RunSetting:
        """The setting to use: `best` if it is certainly faster, otherwise `default`."""
        return self.best if self.is_faster else self.default


@dataclass(frozen=True, slots=True)
class OptionSearch:
    """The search over the values of one option. `values`: a function that returns the settings to
    try; they differ from the given best setting only in this option. `workload`: the measurement,
    which contains the phases that the option affects.
    """

    option: str
    values: Callable[[RunSetting], Sequence[RunSetting]]
    workload: TuningWorkload

    def cost(self, setting: RunSetting) -> float:
        """Return the approximate seconds of the minimum number of rounds. Settings with fewer
        threads are assumed to take longer. `setting`: the best setting so far.
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
    """Return the numbers of threads to try: all cores, all CPUs, half of the cores and three
    quarters of the cores; also 1 if there are at most four cores.
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

    `objective`: a key of OBJECTIVES. `seconds`: the time for the search and the final comparison.
    `tick` is called after each measurement. `coin` decides the order of measurements.
    """
    coin = coin or random.Random()
    began = clock()
    objective_work = TuningWorkload(
        (0, 0), OBJECTIVES[objective], trial.estimate_pace(default), trial.settling
    )
    workload = _choose_workload(objective_work, space, default, seconds)
    searches = [
        option_search
        for option_search in _option_searches(space, workload)
        if option_search.workload.seconds and option_search.values(default)
    ]
    best = default
    tried: list[TriedSetting] = []
    for index, option_search in enumerate(searches):
        time_share = option_search.cost(best) / sum(
            setting.cost(best) for setting in searches[index:]
        )
        deadline = clock() + (SEARCH_SHARE * seconds - (clock() - began)) * time_share
        rates = halve_values(
            partial(option_search.workload.measure_rate, trial, tick=tick),
            best,
            option_search.values(best),
            deadline,
            clock,
            coin,
        )
        best, tried_values = _adopt_value(option_search.option, best, rates)
        tried += tried_values
    comparison = None
    if best != default:
        measures = [
            partial(workload.measure_rate, trial, setting, tick) for setting in (default, best)
        ]
        design = replace(FINAL_DESIGN, seconds=max(1.0, seconds - (clock() - began)))
        comparison = compare_pairs(measures[0], measures[1], design, clock=clock, coin=coin)
    return TuningResult(default, best, tuple(tried), workload, clock() - began, comparison)


def halve_values(
    rate: Callable[[RunSetting], float],
    best: RunSetting,
    values: Sequence[RunSetting],
    deadline: float,
    clock: Clock,
    coin: random.Random,
) -> dict[RunSetting, list[tuple[float, float]]]:
    """Measure `values` and `best` in rounds until `deadline`. At equal intervals, the slower half
    of the values is dropped, until one value remains.

    Returns a list of pairs for each value: for each round, the rate of `best` and the rate of the
    value. The last remaining value has at least MIN_ROUNDS pairs.
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
            is_over = 2 * clock() - started > began + (deadline - began) * rung / rungs
            if is_over and (rung < rungs or len(rates[remaining[0]]) >= MIN_ROUNDS):
                break
        if rung < rungs:
            remaining = sorted(remaining, key=lambda value: -_gain(rates[value]))[
                : len(remaining) // 2
            ]
    return rates


def _gain(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the median over the rounds of the logarithm of a value's speed relative to `best`.
    Each pair is (rate of best, rate of the value).
    """
    return statistics.median(math.log(after / before) for before, after in pairs)


def _adopt_value(
    option: str, before: RunSetting, rates: dict[RunSetting, list[tuple[float, float]]]
) -> tuple[RunSetting, list[TriedSetting]]:
    """Return the new best setting, and all tried values, fastest first. The new best setting is the
    last remaining value if its gain is sufficient; otherwise it is still `before`.
    """
    last_value = max(rates, key=lambda value: (len(rates[value]), _gain(rates[value])))
    best_rates, value_rates = zip(*rates[last_value], strict=True)
    verdict = estimate_ratio(best_rates, value_rates, MIN_GAIN_DESIGN)
    adopted = last_value if verdict is not None and verdict.low > 1 else before
    tried = [
        TriedSetting(option, value, math.exp(_gain(pairs)), len(pairs), value == adopted)
        for value, pairs in rates.items()
    ]
    return adopted, sorted(tried, key=lambda value: -value.ratio)


def _option_searches(space: SearchSpace, work: TuningWorkload) -> list[OptionSearch]:
    """Return the searches of all options, in their order."""
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
        OptionSearch(
            "threads",
            lambda best: [replace(best, threads=n) for n in space.threads if n != best.threads],
            decode,
        ),
        OptionSearch(
            "threads_batch",
            lambda best: [
                replace(best, threads_batch=n) for n in space.threads if n != best.threads_batch
            ],
            prompt,
        ),
        OptionSearch("ubatch", ubatches, prompt),
        OptionSearch(
            "mode",
            lambda best: [
                replace(best, flash=flash, cache=cache)
                for flash, cache in space.modes
                if (flash, cache) != (best.flash, best.cache)
            ],
            work,
        ),
    ]


def _choose_workload(
    objective_work: TuningWorkload, space: SearchSpace, default: RunSetting, seconds: float
) -> TuningWorkload:
    """Return the workload with the longest measurements for which the time suffices. Raises
    UserError if it does not suffice for the shortest measurements.
    """
    min_seconds = math.inf
    sizes = (
        [size for size in lengths if size <= max_tokens] or [0]
        for lengths, max_tokens in zip(SAMPLE_TOKENS, objective_work.objective_tokens, strict=True)
    )
    for prompt, generated in product(*sizes):
        work = replace(objective_work, tokens=(prompt, generated), depth=prompt)
        search_seconds = sum(board.cost(default) for board in _option_searches(space, work))
        needed = max(
            search_seconds / SEARCH_SHARE,
            2 * FINAL_DESIGN.min_pairs * work.seconds / (1 - SEARCH_SHARE),
        )
        if needed <= seconds:
            return work
        min_seconds = min(min_seconds, needed)
    raise UserError(
        f"{seconds:.0f} seconds are too short to compare settings of this model",
        hint=f"--budget {math.ceil(min_seconds)}",
    )
