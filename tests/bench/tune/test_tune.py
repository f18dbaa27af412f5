"""Tuning on a simulated machine: real effects are found within the time, and noise is not
adopted.
"""

import math
import random

import numpy as np
import pytest

from llmcli.bench.tune import tune
from llmcli.bench.tune.tune import RunSetting, SearchSpace
from llmcli.errors import UserError

DEFAULT = RunSetting(threads=4, threads_batch=4)
SPACE = SearchSpace(
    (1, 2, 3, 4, 8), (64, 128, 256, 512, 1024, 2048), (("auto", "f16"), ("off", "f16"))
)


class Machine:
    """A simulated clock and machine. `gains`: factors of the speed for some values of options."""

    settling = 0.01

    def __init__(
        self, gains: dict[tuple[str, object], float], noise: float = 0.02, seed: int = 1
    ) -> None:
        self.gains, self.noise, self.numbers = gains, noise, np.random.default_rng(seed)
        self.now, self.drift, self.measured = 0.0, 0.0, 0

    def estimate_pace(self, setting: RunSetting) -> tuple[float, float]:
        return 0.0005, 0.008

    def time_prompt(self, setting: RunSetting, tokens: int) -> float:
        return self._spend(tokens * 0.0005, setting, ("threads_batch", "ubatch", "flash"))

    def time_decode(self, setting: RunSetting, tokens: int, depth: int) -> float:
        return self._spend(tokens * 0.008, setting, ("threads", "flash", "cache"))

    def _spend(self, seconds: float, setting: RunSetting, names: tuple[str, ...]) -> float:
        self.measured += 1
        self.drift = 0.95 * self.drift + self.noise * self.numbers.standard_normal()
        burst = 2 if self.numbers.random() < 0.02 else 1
        speed = math.prod(self.gains.get((name, getattr(setting, name)), 1.0) for name in names)
        taken = (
            seconds
            / speed
            * burst
            * math.exp(self.drift + self.noise * self.numbers.standard_normal())
        )
        self.now += self.settling + taken
        return taken

    def find(
        self, objective: str = "chat", seconds: float = 120, space: SearchSpace = SPACE
    ) -> tune.TuningResult:
        coin = random.Random(7)
        return tune.tune_settings(
            self, space, DEFAULT, objective, seconds, clock=lambda: self.now, coin=coin
        )


GAINS_AND_BEST: list[tuple[dict[tuple[str, object], float], RunSetting]] = [
    ({("threads", 2): 1.3}, RunSetting(2, 4)),
    ({("threads_batch", 8): 1.5, ("ubatch", 128): 1.2}, RunSetting(4, 8, 128)),
    ({("flash", "off"): 1.2}, RunSetting(4, 4, flash="off")),
    ({("threads", 3): 1.4, ("ubatch", 64): 1.3, ("flash", "off"): 0.8}, RunSetting(3, 4, 64)),
]


@pytest.mark.parametrize(("gains", "best"), GAINS_AND_BEST)
def test_real_gains_are_found_within_the_time(
    gains: dict[tuple[str, object], float], best: RunSetting
) -> None:
    machine = Machine(gains)
    result = machine.find()
    assert result.setting == best
    assert result.is_faster
    assert result.comparison is not None
    seconds = [
        work / math.prod(gains.get((name, getattr(best, name)), 1.0) for name in names)
        for work, names in (
            (512 * 0.0005, ("threads_batch", "ubatch", "flash")),
            (128 * 0.008, ("threads", "flash")),
        )
    ]
    true_ratio = (512 * 0.0005 + 128 * 0.008) / sum(seconds)
    assert result.comparison.low <= true_ratio <= result.comparison.high
    assert machine.now <= 120 * 1.05


def test_noise_does_not_change_the_defaults() -> None:
    """With a confidence of 99 %, at most one of thirty machines without gains may err."""
    assert (
        sum(Machine({}, noise=0.05, seed=seed).find(seconds=60).is_faster for seed in range(30))
        <= 1
    )


def test_several_runs_agree() -> None:
    gains: dict[tuple[str, object], float] = {("threads", 2): 1.15, ("ubatch", 256): 1.001}
    results = [Machine(gains, noise=0.03, seed=seed).find() for seed in range(6)]
    # a gain of 0.1 % is not sufficient
    assert {result.setting for result in results} == {RunSetting(2, 4)}
    assert max(result.comparison.low for result in results) <= min(
        result.comparison.high for result in results
    )


def test_the_objective_decides_which_options_matter() -> None:
    gains: dict[tuple[str, object], float] = {
        ("threads", 2): 1.3,
        ("threads_batch", 8): 1.3,
        ("ubatch", 1024): 1.3,
    }
    assert Machine(gains).find("answers").setting == RunSetting(2, 4)
    assert Machine(gains).find("prompts").setting == RunSetting(4, 8, 1024)
    # a micro-batch of 1024 tokens has no effect on prompts of 512 tokens
    assert Machine(gains).find("chat").setting == RunSetting(2, 8)


def test_a_mode_that_speeds_up_only_one_phase_is_judged_by_the_objective() -> None:
    class SlowDecode(Machine):
        def time_decode(self, setting: RunSetting, tokens: int, depth: int) -> float:
            return super().time_decode(setting, tokens, depth) * (
                1.3 if setting.flash == "off" else 1
            )

    assert (
        SlowDecode({("flash", "off"): 1.2}).find("chat").setting == DEFAULT
    )  # generation dominates
    assert SlowDecode({("flash", "off"): 1.2}).find("prompts").setting.flash == "off"


def test_a_mode_is_judged_at_the_depth_of_the_objective() -> None:
    class SlowAtDepth(Machine):
        def time_decode(self, setting: RunSetting, tokens: int, depth: int) -> float:
            factor = 1 if setting.flash == "off" else 1 + depth / 512
            return super().time_decode(setting, tokens, depth) * factor

    assert SlowAtDepth({("flash", "off"): 0.9}).find("chat").setting.flash == "off"
    assert SlowAtDepth({("flash", "off"): 0.9}).find("answers").setting == DEFAULT


def test_a_cache_type_is_tried_only_if_requested() -> None:
    gains: dict[tuple[str, object], float] = {("cache", "q8_0"): 1.3}
    assert Machine(gains).find().setting == DEFAULT
    space = SearchSpace(SPACE.threads, SPACE.ubatches, (*SPACE.modes, ("auto", "q8_0")))
    assert Machine(gains).find(space=space).setting == RunSetting(4, 4, cache="q8_0")


def test_less_time_makes_the_measurements_shorter() -> None:
    long, short = Machine({}).find(seconds=300), Machine({}).find(seconds=40)
    assert long.workload.tokens == (512, 32)
    assert sum(short.workload.tokens) < sum(long.workload.tokens)


def test_too_little_time_is_refused_with_a_sufficient_budget() -> None:
    with pytest.raises(UserError, match="too short") as refused:
        Machine({}).find(seconds=2)
    budget = float(refused.value.hint.removeprefix("--budget "))
    machine = Machine({})
    machine.find(seconds=budget)
    assert machine.now <= budget * 1.2


def test_a_single_cpu_with_one_value_per_option_needs_no_search() -> None:
    space = SearchSpace((1,), (512,), (("auto", "f16"),))
    machine = Machine({})
    result = tune.tune_settings(
        machine, space, RunSetting(1, 1), "chat", 60, clock=lambda: machine.now
    )
    assert (result.setting, result.comparison, result.tried) == (RunSetting(1, 1), None, ())


@pytest.mark.parametrize(
    ("cores", "cpus", "counts"),
    [(1, 1, [1]), (2, 2, [1, 2]), (4, 8, [1, 2, 3, 4, 8]), (32, 64, [16, 24, 32, 64])],
)
def test_thread_counts_to_try(cores: int, cpus: int, counts: list[int]) -> None:
    assert tune.thread_counts(cores, cpus) == counts
