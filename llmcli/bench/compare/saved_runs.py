"""Comparison of two saved runs of `bench`. They were measured at different times, so no measurement
of one run can be paired with one of the other.

The interval is Welch's, on the logarithms of the rates. It is widened for drift, because whatever
slows down a whole run does not show in the scatter of the run's own samples. Two runs at different
times differ at least as much as the repetitions within one run. Therefore each run adds the
variance of its repetitions, and at least MIN_DRIFT squared.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.bench.statistics.paired_test import Comparison
from llmcli.bench.statistics.student_t import student_t_quantile
from llmcli.errors import UserError
from llmcli.text_input import expand_path, read_text
from quant.json_dataclasses import parse_value

# minimum standard deviation of the logarithm of a run's speed, on a quiet machine
MIN_DRIFT = 0.03
MAX_LOG = 700.0  # of a ratio of speeds; a larger one is infinite
MAX_FILE_BYTES = 1 << 25  # maximum bytes of a file with runs
MAKE_FILE_HINT = "create such a file: llmcli bench REF -o json > FILE"

SavedRow = Mapping[str, Any]

# Fields of llama-bench. Two tests are the same if all TEST_FIELDS are equal. Tests with different
# MACHINE_FIELDS are only compared with --anyway.
TEST_FIELDS = ("n_prompt", "n_gen", "n_depth", "n_parallel", "sampling", "load", "mix", "shared")
MACHINE_FIELDS = ("cpu_info", "gpu_info", "backends")
SETTING_FIELDS = (
    "n_threads",
    "n_batch",
    "n_ubatch",
    "type_k",
    "type_v",
    "n_gpu_layers",
    "flash_attn",
)
COMPARED_FIELDS = (
    "model_filename",
    "model_type",
    "model_size",
    "model_n_params",
    "build_commit",
    *SETTING_FIELDS,
)
FIELD_DEFAULTS = {
    "n_depth": 0,
    "n_parallel": 1,
    "sampling": False,
}  # values of fields that are missing in JSON of llama-bench and of older versions


@dataclass(frozen=True, slots=True)
class SavedRuns:
    """Saved results of `bench`: one run of the history, or all results of a JSON file. Each row is
    an object of `bench -o json`.
    """

    name: str
    rows: tuple[SavedRow, ...]

    @property
    def origin(self) -> str:
        """The model file and the time of the first row, as text."""
        values = [self.rows[0].get(field) for field in ("model_filename", "test_time")]
        return ", ".join(text for text in values if isinstance(text, str))


@dataclass(frozen=True, slots=True)
class MatchedTest:
    """A test that both saved runs contain: its row in run A and its row in run B."""

    a: SavedRow
    b: SavedRow

    def differences(
        self, fields: Sequence[str] = (*TEST_FIELDS, *MACHINE_FIELDS, *COMPARED_FIELDS)
    ) -> list[tuple[str, Any, Any]]:
        """Return the fields that differ between the two rows, as tuples (field, value of A, value
        of B). Only `fields` are compared.
        """
        values = [
            (field, field_value(self.a, field), field_value(self.b, field)) for field in fields
        ]
        return [difference for difference in values if difference[1] != difference[2]]


def read_saved_runs(text: str, find: Callable[[int], SavedRow]) -> SavedRuns | None:
    """Return the saved runs that `text` names, or None if it names none. `text` is the number of a
    run in the history, or the path of a file that `bench -o json` or `-o jsonl` wrote.

    `find` returns the row of a run in the history by its number. Raises UserError if the file
    cannot be read or contains no run.
    """
    if text.isdecimal() and text.isascii() and len(text) < 19:
        return SavedRuns(f"run {text}", (validate_row(find(int(text)), f"run {text}"),))
    path = expand_path(text)
    if path.suffix not in (".json", ".jsonl"):
        return None
    rows = tuple(validate_row(row, text) for row in _documents(path))
    if not rows:
        raise UserError(f"{text} contains no run", hint=MAKE_FILE_HINT)
    return SavedRuns(path.name, rows)


def validate_row(row: Any, where: str) -> SavedRow:
    """Return the row if it has the fields of a result of `bench`. Raises UserError otherwise.
    `where`: the origin of the row, for the error message.
    """
    rates = row.get("samples_ts") if isinstance(row, Mapping) else None
    is_valid = isinstance(rates, list) and rates and all(_rate(rate) for rate in rates)
    if is_valid:
        values = [
            row[field]
            for field in (*TEST_FIELDS, *MACHINE_FIELDS, *COMPARED_FIELDS)
            if row.get(field) is not None
        ]
        is_valid = all(
            type(row.get(field)) is int and 0 <= row[field] < 2**31
            for field in ("n_prompt", "n_gen")
        )
        is_valid = is_valid and all(
            isinstance(number, str | int) or _finite(number) for number in values
        )
        is_valid = is_valid and isinstance(field_value(row, "n_depth"), int)
    if not is_valid:
        raise UserError(
            f"{where} contains an entry that is not a run of bench",
            hint=MAKE_FILE_HINT,
        )
    valid_row: SavedRow = row
    return valid_row


def field_value(row: SavedRow, field: str) -> Any:
    """Return the value of a field of a row. A field that is missing or null has the value in
    FIELD_DEFAULTS.
    """
    stored = row.get(field)
    return FIELD_DEFAULTS.get(field) if stored is None else stored


def format_test_name(row: SavedRow) -> str:
    """Return the name of a row's test. The row of a load test contains its name; other names are
    composed from the row's fields.
    """
    if row.get("load") is not None and isinstance(stored_name := row.get("test"), str):
        return stored_name
    test = SpeedTest(
        row["n_prompt"], row["n_gen"], int(field_value(row, "n_depth")), 0, 0, "", "", 0, 0, ""
    )
    n_parallel = field_value(row, "n_parallel")
    return (
        test.name
        + (f" x{n_parallel}" if n_parallel != 1 else "")
        + (" sampled" if field_value(row, "sampling") else "")
    )


def match_tests(a: SavedRuns, b: SavedRuns, ignore_differences: bool) -> list[MatchedTest]:
    """Return the tests that both runs contain. If a run contains a test several times with
    different settings, rows match only if their settings are equal, too.

    Raises UserError if the runs have no test in common, if a row still matches several rows, or if
    the runs come from different machines. `ignore_differences`: allow different machines, and also
    compare two different tests if each run has only one row.
    """
    matches = list(_pairs(a.rows, b.rows, TEST_FIELDS))
    if not _single(matches):
        matches = list(_pairs(a.rows, b.rows, (*TEST_FIELDS, *SETTING_FIELDS)))
    if not matches and ignore_differences and len(a.rows) == len(b.rows) == 1:
        matches = [MatchedTest(a.rows[0], b.rows[0])]
    if not matches or not _single(matches):
        tests = [
            ", ".join(dict.fromkeys(format_test_name(row) for row in side.rows)) for side in (a, b)
        ]
        why = "were measured several times" if matches else "have no test in common"
        hint = (
            "--anyway compares two single runs of different tests"
            if not matches
            else "name single runs: llmcli bench history"
        )
        raise UserError(f"{a.name} ({tests[0]}) and {b.name} ({tests[1]}) {why}", hint=hint)
    machine_differences = [
        difference for pair in matches for difference in pair.differences(MACHINE_FIELDS)
    ]
    if machine_differences and not ignore_differences:
        field, value_a, value_b = machine_differences[0]
        raise UserError(
            f"different machines: {field} is {value_a!r} in {a.name} and {value_b!r} in {b.name}",
            hint="--anyway compares the runs",
        )
    return matches


def compare_rates(a: Sequence[float], b: Sequence[float], confidence: float) -> Comparison:
    """Return the speed of B relative to A with its interval. `a`, `b`: tokens per second of each
    repetition. If A or B has only one repetition, the interval is infinite.
    """
    logs = [np.log(np.asarray(rates, float)) for rates in (a, b)]
    middle = float(logs[1].mean() - logs[0].mean())
    half = math.inf
    if min(len(side_logs) for side_logs in logs) > 1:
        spreads = [float(side_logs.var(ddof=1)) for side_logs in logs]
        variances = [
            spread / len(side_logs) for spread, side_logs in zip(spreads, logs, strict=True)
        ]
        error, drift = sum(variances), sum(max(MIN_DRIFT**2, spread) for spread in spreads)
        weight = sum(
            part**2 / (len(side_logs) - 1) for part, side_logs in zip(variances, logs, strict=True)
        )
        tail = (1 + confidence) / 2
        factor = student_t_quantile(tail, error**2 / weight) if weight else 0.0
        half = math.sqrt(factor**2 * error + NormalDist().inv_cdf(tail) ** 2 * drift)
    return Comparison(
        math.exp(middle),
        math.exp(middle - half),
        math.inf if middle + half > MAX_LOG else math.exp(middle + half),
        confidence,
        tuple(a),
        tuple(b),
    )


def _documents(path: Path) -> list[Any]:
    text = read_text(path, max_bytes=MAX_FILE_BYTES, size_hint=MAKE_FILE_HINT)
    try:
        if path.suffix == ".jsonl":
            lines = (line for line in text.split("\n") if line.strip())
            return [parse_value(line, MAX_FILE_BYTES) for line in lines]
        parsed = parse_value(text, MAX_FILE_BYTES)
    except ValueError:
        raise UserError(f"{path} is not valid JSON", hint=MAKE_FILE_HINT) from None
    return parsed if isinstance(parsed, list) else [parsed]


def _finite(number: Any) -> bool:
    """Return whether the value is a finite float, such as the field `shared` of a load test."""
    return type(number) is float and math.isfinite(number)


def _rate(rate: Any) -> bool:
    return type(rate) in (int, float) and 0 < rate < 1e300


def _pairs(
    a: Sequence[SavedRow], b: Sequence[SavedRow], fields: Sequence[str]
) -> Iterator[MatchedTest]:
    for row_a in a:
        for row_b in b:
            if all(field_value(row_a, field) == field_value(row_b, field) for field in fields):
                yield MatchedTest(row_a, row_b)


def _single(matches: Sequence[MatchedTest]) -> bool:
    """Return whether no row occurs in two matches."""
    sides = ([id(pair.a) for pair in matches], [id(pair.b) for pair in matches])
    return all(len(set(side)) == len(side) for side in sides)
