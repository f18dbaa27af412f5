"""Sweeps: which values run, in which order, and which one is reported as the fastest."""

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


def machine(speeds: dict[int, float], noise: float, seed: int = 1):
    """Measures by threads; noise that drifts, and is the same at every run."""
    numbers, drift = np.random.default_rng(seed), [0.0]

    def measured(test: Case) -> SpeedResult:
        drift[0] = 0.9 * drift[0] + noise * numbers.standard_normal()
        seconds = 16 / speeds[test.n_threads] * np.exp(drift[0] + noise * numbers.standard_normal())
        return SpeedResult(ABOUT, test, "", (int(seconds * 1e9),), (seconds / 16 * 1e3,) * 16)

    return measured


def cases(counts: list[int]) -> list[Case]:
    return [replace(CASE, n_threads=count) for count in counts]


def swept(speeds: dict[int, float], noise: float) -> dict[int, str]:
    random.seed(2)
    found = sweep.measure_rounds(cases(list(speeds)), sweep.DEFAULT_ROUNDS, machine(speeds, noise))
    (group,) = sweep.rank_results(found)
    return {one.result.test.n_threads: one.mark for one in group}


def test_the_fastest_is_marked_where_it_is_clear():
    assert swept({1: 50, 2: 90, 4: 100, 8: 60}, 0.01) == {1: "", 2: "", 4: "fastest", 8: ""}


def test_values_that_the_noise_does_not_tell_apart_are_level():
    marks = swept({1: 50, 2: 100, 4: 100.1}, 0.05)
    assert marks == {1: "", 2: "level", 4: "level"}


def test_few_rounds_tell_nothing():
    found = sweep.measure_rounds(cases([1, 2]), 3, machine({1: 50, 2: 100}, 0.001))
    table = sweep.build_table(found, ["threads_sweep"])
    assert table.columns == ("test", "threads", "tok/s", "of the fastest", "")
    assert table.right_columns == ("threads", "tok/s", "of the fastest")
    assert [row[-1] for row in table.rows] == ["level", "level"]
    assert "too few rounds" in table.rows[0][3]


def test_every_round_has_every_test_and_their_order_changes():
    seen: list[int] = []
    measured = machine({1: 1, 2: 2, 3: 3}, 0.1)

    def told(test: Case) -> SpeedResult:
        seen.append(test.n_threads)
        return measured(test)

    random.seed(3)
    (first, _, last) = sweep.measure_rounds(cases([1, 2, 3]), 12, told)
    rounds = [tuple(seen[at : at + 3]) for at in range(0, 36, 3)]
    assert all(sorted(one) == [1, 2, 3] for one in rounds)
    assert len(set(rounds)) > 2
    assert len(first.samples_ns) == 12
    assert len(last.tokens_ms) == 12 * 16


def test_what_llama_cpp_refuses_is_left_out():
    measured = machine({1: 1, 2: 2, 3: 3}, 0.1)

    def refusing(test: Case) -> SpeedResult:
        if test.n_threads == 2:
            raise UserError("llama.cpp refuses this context", hint="")
        return measured(test)

    found = sweep.measure_rounds(cases([1, 2, 3]), 2, refusing)
    assert [one.test.n_threads for one in found] == [1, 3]


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
def test_threads_reach_from_one_to_all(cpus: int, cores: int, counts: list[int]):
    assert sweep.thread_counts(cpus, cores) == counts


def test_micro_batches_are_no_longer_than_what_is_computed():
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


def test_cache_types_are_those_that_go_with_flash_attention():
    every = [
        replace(CASE, type_k=k, type_v=v, flash_attn=fa)
        for fa in ("on", "off")
        for k in ("f16", "q8_0", "bf16")
        for v in ("f16", "q8_0", "bf16")
    ]
    kept = [(one.type_k, one.flash_attn) for one in sweep.allowed_tests(every, {})]
    assert kept == [("f16", "on"), ("q8_0", "on"), ("bf16", "on"), ("f16", "off"), ("bf16", "off")]
