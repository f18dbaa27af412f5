"""Two saved runs: which may be compared, and the confidence from samples that were not interleaved."""

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


def none(number: int) -> Mapping[str, Any]:
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
def test_student_s_table(share: float, freedom: float, t: float):
    assert student_t_quantile(share, freedom) == pytest.approx(t, abs=6e-4)


def test_runs_that_drift_apart_are_not_told_apart_too_often():
    """Each run's whole level is off by what its repetitions differ by, and 3 % at the least."""
    rng, missed, naive = np.random.default_rng(2), 0, 0
    for _ in range(200):
        a, b = (np.exp(rng.normal(0, 0.03) + 0.01 * rng.standard_normal(5)) * 100 for _ in range(2))
        found = compare_rates(a.tolist(), b.tolist(), 0.99)
        missed += not found.low <= 1 <= found.high
        error = math.sqrt(sum(np.log(one).var(ddof=1) / 5 for one in (a, b)))
        naive += abs(math.log(found.ratio)) > 3.36 * error
    assert missed <= 5
    assert naive > 50  # what Welch's interval alone would have called


def test_a_noisy_run_is_worth_less_and_a_single_repetition_nothing():
    steady = compare_rates([100, 101, 99], [120, 121, 119], 0.99)
    noisy = compare_rates([100, 150, 60], [120, 180, 70], 0.99)
    assert steady.differs and steady.ratio == pytest.approx(1.2, rel=0.001)
    assert not noisy.differs and noisy.resolution > steady.resolution
    assert compare_rates([100], [200, 201], 0.99).high == math.inf
    assert compare_rates([100, 100], [150, 150], 0.99).low > 1.3


def test_a_number_is_a_run_of_the_history_and_json_a_file(tmp_path: Path):
    assert read_saved_runs("12", lambda number: {**ROW, "n_gen": number}) == side(
        "run 12", {"n_gen": 12}
    )
    lines, whole = tmp_path / "a.jsonl", tmp_path / "b.json"
    lines.write_text(json.dumps(ROW) + "\n\n" + json.dumps(ROW) + "\n")
    whole.write_text(json.dumps([ROW]))
    assert read_saved_runs(str(lines), none) == side("a.jsonl", {}, {})
    assert read_saved_runs(str(whole), none) == side("b.json", {})
    assert read_saved_runs("smollm2:135m", none) is None
    with pytest.raises(UserError, match="no run 7"):
        read_saved_runs("7", none)


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
def test_what_is_no_file_of_runs_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "x.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"x\.json"):
        read_saved_runs(str(file), none)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match="cannot read"):
        read_saved_runs(str(tmp_path / "none.json"), none)


def test_the_same_tests_are_compared_and_what_differs_is_told():
    a = side("a", {}, {"n_prompt": 512, "n_gen": 0}, {"n_depth": 4096})
    b = side("b", {"n_threads": 1}, {"n_prompt": 512, "n_gen": 0, "n_threads": 1})
    found = match_tests(a, b, False)
    assert [format_test_name(one.a) for one in found] == ["tg128", "pp512"]
    assert found[0].differences() == [("n_threads", 2, 1)]


def test_several_settings_in_both_are_matched_by_their_settings():
    grid = [{"n_threads": 1}, {"n_threads": 2}]
    newer = [{**row, "build_commit": "y"} for row in grid]
    found = match_tests(side("a", *grid), side("b", *newer), False)
    assert [(one.a["n_threads"], one.b["n_threads"]) for one in found] == [(1, 1), (2, 2)]
    with pytest.raises(UserError, match="several times"):
        match_tests(side("a", *grid, *grid), side("b", *grid), True)


def test_other_tests_and_machines_are_refused_unless_wanted():
    a, deep, other = side("a", {}), side("b", {"n_depth": 512}), side("c", {"cpu_info": "another"})
    with pytest.raises(
        UserError, match=r"a \(tg128\) and b \(tg128 @ d512\) have no test in common"
    ):
        match_tests(a, deep, False)
    with pytest.raises(UserError, match="cpu_info is 'cpu' in a and 'another' in c"):
        match_tests(a, other, False)
    assert match_tests(a, deep, True)[0].differences() == [("n_depth", 0, 512)]
    assert match_tests(a, other, True)[0].differences() == [("cpu_info", "cpu", "another")]
    with pytest.raises(UserError, match="no test in common"):
        match_tests(side("a", {}, {}), side("b", {"sampling": True}), True)


def test_what_llama_bench_does_not_write_is_what_it_measures():
    bare = {field: value for field, value in ROW.items() if field != "n_depth"}
    ours = {**ROW, "n_parallel": 1, "sampling": False}
    assert (
        match_tests(SavedRuns("a", (bare,)), SavedRuns("b", (ours,)), False)[0].differences() == []
    )
