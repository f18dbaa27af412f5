"""Sweeps: which values are measured, in which order, and which one is reported as the fastest."""

import random
from dataclasses import replace

import numpy as np
import pytest

from llmcli.bench.speed import sweep
from llmcli.bench.speed.measure import ModelUnderTest, SpeedResult
from llmcli.bench.speed.parameter_grid import SpeedTest as Case
from llmcli.errors import UserError

ABOUT = ModelUnderTest("a.gguf", "llama", 1, 1)
CASE = Case(0, 16, 0, 2048, 512, "f16", "f16", 1, -1, "auto")


def make_machine(speeds: dict[int, float], noise: float, seed: int = 1):
    """Return a function that simulates a measurement. The speed depends on the number of threads;
    the noise drifts and is the same in every run.
    """
    numbers, drift = np.random.default_rng(seed), [0.0]

    def measure(test: Case) -> SpeedResult:
        drift[0] = 0.9 * drift[0] + noise * numbers.standard_normal()
        seconds = 16 / speeds[test.n_threads] * np.exp(drift[0] + noise * numbers.standard_normal())
        return SpeedResult(ABOUT, test, "", (int(seconds * 1e9),), (seconds / 16 * 1e3,) * 16)

    return measure


def make_tests(counts: list[int]) -> list[Case]:
    return [replace(CASE, n_threads=count) for count in counts]


def run_sweep(speeds: dict[int, float], noise: float) -> dict[int, str]:
    random.seed(2)
    results = sweep.measure_rounds(
        make_tests(list(speeds)), sweep.DEFAULT_ROUNDS, make_machine(speeds, noise)
    )
    (group,) = sweep.rank_results(results)
    return {entry.result.test.n_threads: entry.mark for entry in group}


def test_a_clearly_fastest_value_is_marked():
    assert run_sweep({1: 50, 2: 90, 4: 100, 8: 60}, 0.01) == {1: "", 2: "", 4: "fastest", 8: ""}


def test_values_within_the_noise_are_level():
    marks = run_sweep({1: 50, 2: 100, 4: 100.1}, 0.05)
    assert marks == {1: "", 2: "level", 4: "level"}


def test_too_few_rounds_give_no_ranking():
    results = sweep.measure_rounds(make_tests([1, 2]), 3, make_machine({1: 50, 2: 100}, 0.001))
    table = sweep.build_table(results, ["threads_sweep"])
    assert table.columns == ("test", "threads", "tok/s", "of the fastest", "")
    assert table.right_columns == ("threads", "tok/s", "of the fastest")
    assert [row[-1] for row in table.rows] == ["level", "level"]
    assert "too few rounds" in table.rows[0][3]


def test_every_round_measures_all_tests_in_random_order():
    measured_threads: list[int] = []
    measure = make_machine({1: 1, 2: 2, 3: 3}, 0.1)

    def recording_measure(test: Case) -> SpeedResult:
        measured_threads.append(test.n_threads)
        return measure(test)

    random.seed(3)
    (first, _, last) = sweep.measure_rounds(make_tests([1, 2, 3]), 12, recording_measure)
    rounds = [tuple(measured_threads[at : at + 3]) for at in range(0, 36, 3)]
    assert all(sorted(round_threads) == [1, 2, 3] for round_threads in rounds)
    assert len(set(rounds)) > 2
    assert len(first.samples_ns) == 12
    assert len(last.tokens_ms) == 12 * 16


def test_tests_that_llama_cpp_refuses_are_left_out():
    measure = make_machine({1: 1, 2: 2, 3: 3}, 0.1)

    def refusing(test: Case) -> SpeedResult:
        if test.n_threads == 2:
            raise UserError("llama.cpp refuses this context", hint="")
        return measure(test)

    results = sweep.measure_rounds(make_tests([1, 2, 3]), 2, refusing)
    assert [result.test.n_threads for result in results] == [1, 3]


@pytest.mark.parametrize(
    ("cpus", "cores", "counts"),
    [
        (2, 2, [1, 2]),
        (1, 1, [1]),
        (10, 5, [1, 2, 3, 4, 5, 6, 7, 8, 10]),
        (64, 32, [*range(1, 9), 12, 16, 24, 32, 48, 64]),
        (28, 14, [*range(1, 9), 12, 14, 16, 24, 28]),
    ],
)
def test_thread_counts_reach_from_one_to_all_cpus(cpus: int, cores: int, counts: list[int]):
    assert sweep.thread_counts(cpus, cores) == counts


def test_micro_batches_are_no_longer_than_the_prompt():
    assert sweep.sweep_values("ubatch_sweep", 1, 1, 2048) == [
        "64",
        "128",
        "256",
        "512",
        "1024",
        "2048",
    ]
    assert sweep.sweep_values("ubatch_sweep", 1, 1, 300) == ["64", "128", "256"]
    assert sweep.sweep_values("ubatch_sweep", 1, 1, 20) == ["20"]


def test_allowed_cache_types_depend_on_flash_attention():
    tests = [
        replace(CASE, type_k=k, type_v=v, flash_attn=fa)
        for fa in ("on", "off")
        for k in ("f16", "q8_0", "bf16")
        for v in ("f16", "q8_0", "bf16")
    ]
    allowed = [(test.type_k, test.flash_attn) for test in sweep.allowed_tests(tests, {})]
    assert allowed == [
        ("f16", "on"),
        ("q8_0", "on"),
        ("bf16", "on"),
        ("f16", "off"),
        ("bf16", "off"),
    ]
