"""Speed tests on a real model, and llama-bench's output formats."""

import csv
import io
import json

import pytest

from llmcli.bench.speed.llama_bench_output import format_results
from llmcli.bench.speed.parameter_grid import ParameterGrid
from llmcli.bench.speed.run import SpeedSettings, run_tests
from llmcli.errors import UserError
from llmcli.ui import UI

# The fields of llama-bench's JSON that other programs read (tools/llama-bench/README.md,
# compare-llama-bench.py).
FIELDS = (  # noqa: SIM905
    "build_commit cpu_info model_filename model_type model_size model_n_params n_batch n_ubatch n_threads type_k "
    "type_v n_gpu_layers flash_attn n_prompt n_gen n_depth avg_ns stddev_ns avg_ts stddev_ts samples_ns samples_ts"
).split()


@pytest.fixture(scope="module")
def results(stories_gguf):
    grid = ParameterGrid([40], [6], [], [0, 8], [16], [16], ["f16"], ["f16"], [1], [-1], ["auto"])
    return run_tests(stories_gguf, list(grid.tests()), SpeedSettings(3), UI())


def test_json_has_llama_benchs_fields_and_consistent_numbers(results):
    rows = json.loads(format_results(results, "json"))
    assert [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows] == [
        (40, 0, 0),
        (0, 6, 0),
        (40, 0, 8),
        (0, 6, 8),
    ]
    for row in rows:
        assert set(FIELDS) <= set(row)
        assert len(row["samples_ns"]) == len(row["samples_ts"]) == 3
        count = row["n_prompt"] + row["n_gen"]
        assert row["samples_ts"] == pytest.approx(
            [count * 1e9 / ns for ns in row["samples_ns"]], rel=1e-3
        )
        # an integer, as in llama-bench
        assert row["avg_ns"] == round(sum(row["samples_ns"]) / 3)
        assert row["sampling"] is False
        assert (row["itl_ms"] is None) == (row["reading"] is None) == (row["n_gen"] == 0)
        if read := row["reading"]:
            assert read["words_per_minute"] == pytest.approx(
                row["avg_ts"] * 60 / read["tokens_per_word"], rel=1e-3
            )
    assert [json.loads(line) for line in format_results(results, "jsonl").splitlines()] == rows


def test_csv_quotes_every_value_and_can_be_parsed(results):
    lines = format_results(results, "csv").splitlines()
    assert all(part.startswith('"') for part in lines[1].split('","')[0:1])
    rows = list(csv.DictReader(io.StringIO(format_results(results, "csv"))))
    assert [row["n_gen"] for row in rows] == ["0", "6", "0", "6"]


def test_the_table_has_llama_benchs_columns_and_test_names(results):
    head, _, *rows = format_results(results, "md").splitlines()
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    assert columns == [
        "model",
        "size",
        "params",
        "backend",
        "threads",
        "n_batch",
        "n_ubatch",
        "test",
        "t/s",
    ]
    names = [row.strip("|").split("|")[-2].strip() for row in rows if row.startswith("|")]
    assert names == ["pp40", "tg6", "pp40 @ d8", "tg6 @ d8"]
    assert all("±" in row for row in rows if row.startswith("|"))
    (line,) = (row for row in rows if "words a minute" in row)
    assert " to " in line  # two depths


def test_percentiles_increase(results):
    times = results[1].itl_ms
    assert times["p50"] <= times["p90"] <= times["p95"] <= times["p99"] <= times["max"]


def test_an_empty_list_of_tests_is_refused(stories_gguf):
    with pytest.raises(UserError, match="no test"):
        run_tests(stories_gguf, [], SpeedSettings(1), UI())
