"""Comparison of two saved runs: which runs may be compared, and the interval of the ratio."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcli.bench.compare.saved_runs import (
    SavedRuns,
    compare_rates,
    format_test_name,
    match_tests,
    read_saved_runs,
)
from llmcli.bench.statistics.student_t import student_t_quantile
from llmcli.errors import UserError

ROW: dict[str, Any] = {
    "build_commit": "x",
    "cpu_info": "cpu",
    "gpu_info": "",
    "backends": "CPU",
    "model_filename": "a.gguf",
    "model_type": "llama",
    "model_size": 1,
    "model_n_params": 1,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads": 2,
    "type_k": "f16",
    "type_v": "f16",
    "n_gpu_layers": -1,
    "flash_attn": -1,
    "n_prompt": 0,
    "n_gen": 128,
    "n_depth": 0,
    "samples_ts": [100.0, 101.0, 99.0],
}


def no_such_run(number: int) -> Mapping[str, Any]:
    raise UserError(f"the history has no run {number}")


def side(name: str, *rows: dict[str, Any]) -> SavedRuns:
    return SavedRuns(name, tuple({**ROW, **row} for row in rows))


@pytest.mark.parametrize(
    ("share", "freedom", "t"),
    [
        (0.995, 4, 4.604),
        (0.975, 10, 2.228),
        (0.95, 1, 6.314),
        (0.995, 8, 3.355),
        (0.975, 10**6, 1.960),
    ],
)
def test_quantiles_of_students_t(share: float, freedom: float, t: float):
    assert student_t_quantile(share, freedom) == pytest.approx(t, abs=6e-4)


def test_drift_between_runs_rarely_counts_as_a_difference():
    """The speed of each run drifts as a whole, with a standard deviation of 3 %."""
    rng, differences, welch_differences = np.random.default_rng(2), 0, 0
    for _ in range(200):
        a, b = (np.exp(rng.normal(0, 0.03) + 0.01 * rng.standard_normal(5)) * 100 for _ in range(2))
        comparison = compare_rates(a.tolist(), b.tolist(), 0.99)
        differences += not comparison.low <= 1 <= comparison.high
        error = math.sqrt(sum(np.log(rates).var(ddof=1) / 5 for rates in (a, b)))
        welch_differences += abs(math.log(comparison.ratio)) > 3.36 * error
    assert differences <= 5
    assert welch_differences > 50  # Welch's interval without drift would report a difference


def test_noise_widens_the_interval_and_one_repetition_has_none():
    steady = compare_rates([100, 101, 99], [120, 121, 119], 0.99)
    noisy = compare_rates([100, 150, 60], [120, 180, 70], 0.99)
    assert steady.differs and steady.ratio == pytest.approx(1.2, rel=0.001)
    assert not noisy.differs and noisy.resolution > steady.resolution
    assert compare_rates([100], [200, 201], 0.99).high == math.inf
    assert compare_rates([100, 100], [150, 150], 0.99).low > 1.3
    assert compare_rates([1, 1e-300], [1e300, 1], 0.99).high == math.inf


def test_a_number_names_a_run_of_the_history_and_a_json_name_a_file(tmp_path: Path):
    assert read_saved_runs("12", lambda number: {**ROW, "n_gen": number}) == side(
        "run 12", {"n_gen": 12}
    )
    jsonl_file, json_file = tmp_path / "a.jsonl", tmp_path / "b.json"
    jsonl_file.write_text(json.dumps(ROW) + "\n\n" + json.dumps(ROW) + "\n")
    json_file.write_text(json.dumps([ROW]))
    assert read_saved_runs(str(jsonl_file), no_such_run) == side("a.jsonl", {}, {})
    assert read_saved_runs(str(json_file), no_such_run) == side("b.json", {})
    assert read_saved_runs("smollm2:135m", no_such_run) is None
    with pytest.raises(UserError, match="no run 7"):
        read_saved_runs("7", no_such_run)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[1]",
        "[[]]",
        "{}",
        '[{"samples_ts": []}]',
        "[" * 100_000,
        json.dumps({**ROW, "n_gen": -1}),
        json.dumps({**ROW, "n_gen": True}),
        json.dumps({**ROW, "samples_ts": [0]}),
        "\udcff",
        json.dumps({**ROW, "samples_ts": [float("nan")]}),
        json.dumps({**ROW, "samples_ts": ["1"]}),
        json.dumps({**ROW, "cpu_info": ["a"]}),
        json.dumps({**ROW, "n_depth": "x"}),
        json.dumps({**ROW, "shared": float("inf")}),
        json.dumps({**ROW, "samples_ts": [10**400]}),
        json.dumps({**ROW, "n_parallel": {}}),
    ],
)
def test_a_file_without_valid_runs_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "x.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"x\.json"):
        read_saved_runs(str(file), no_such_run)


def test_a_missing_file_is_a_user_error(tmp_path: Path):
    with pytest.raises(UserError, match="cannot read"):
        read_saved_runs(str(tmp_path / "none.json"), no_such_run)


def test_equal_tests_are_matched_and_differing_fields_are_listed():
    a = side("a", {}, {"n_prompt": 512, "n_gen": 0}, {"n_depth": 4096})
    b = side("b", {"n_threads": 1}, {"n_prompt": 512, "n_gen": 0, "n_threads": 1})
    matches = match_tests(a, b, False)
    assert [format_test_name(match.a) for match in matches] == ["tg128", "pp512"]
    assert matches[0].differences() == [("n_threads", 2, 1)]


def test_repeated_tests_are_matched_by_their_settings():
    grid = [{"n_threads": 1}, {"n_threads": 2}]
    newer = [{**row, "build_commit": "y"} for row in grid]
    matches = match_tests(side("a", *grid), side("b", *newer), False)
    assert [(match.a["n_threads"], match.b["n_threads"]) for match in matches] == [(1, 1), (2, 2)]
    with pytest.raises(UserError, match="several times"):
        match_tests(side("a", *grid, *grid), side("b", *grid), True)


def test_different_tests_and_machines_are_refused_unless_ignored():
    a, deep, other_machine = (
        side("a", {}),
        side("b", {"n_depth": 512}),
        side("c", {"cpu_info": "another"}),
    )
    with pytest.raises(
        UserError, match=r"a \(tg128\) and b \(tg128 @ d512\) have no test in common"
    ):
        match_tests(a, deep, False)
    with pytest.raises(UserError, match="cpu_info is 'cpu' in a and 'another' in c"):
        match_tests(a, other_machine, False)
    assert match_tests(a, deep, True)[0].differences() == [("n_depth", 0, 512)]
    assert match_tests(a, other_machine, True)[0].differences() == [("cpu_info", "cpu", "another")]
    with pytest.raises(UserError, match="no test in common"):
        match_tests(side("a", {}, {}), side("b", {"sampling": True}), True)


def test_missing_fields_have_llama_benchs_defaults():
    llama_bench_row = {field: value for field, value in ROW.items() if field != "n_depth"}
    llmcli_row = {**ROW, "n_parallel": 1, "sampling": False}
    assert (
        match_tests(SavedRuns("a", (llama_bench_row,)), SavedRuns("b", (llmcli_row,)), False)[
            0
        ].differences()
        == []
    )
