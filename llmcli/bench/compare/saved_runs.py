"""Two runs measured before, compared: their samples are all there is, and nothing was interleaved.

Welch's interval on the logarithms of the rates, and more: whatever moved the whole of one run and
not of the other is in no sample. Runs of one thing minutes apart differ at least as much as
repetitions in a row do, so that much is added for each run, and never less than DRIFT.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from llmcli.bench.speed.parameter_grid import Test
from llmcli.bench.statistics.paired_test import Comparison
from llmcli.bench.statistics.student_t import student
from llmcli.errors import UserError

# standard deviation of a run's logarithm: what runs of a quiet machine differ by, at the least
DRIFT = 0.03
MOST_BYTES = 1 << 26  # of a file of runs

Row = Mapping[str, Any]

# llama-bench's fields. A test is the same where TEST is; MACHINE is what may not differ without
# being asked for.
TEST = ("n_prompt", "n_gen", "n_depth", "n_parallel", "sampling", "load", "mix", "shared")
MACHINE = ("cpu_info", "gpu_info", "backends")
SETTINGS = ("n_threads", "n_batch", "n_ubatch", "type_k", "type_v", "n_gpu_layers", "flash_attn")
ABOUT = ("model_filename", "model_type", "model_size", "model_n_params", "build_commit", *SETTINGS)
ABSENT = {
    "n_depth": 0,
    "n_parallel": 1,
    "sampling": False,
}  # in llama-bench's own JSON, and in its older ones


@dataclass(frozen=True, slots=True)
class Saved:
    """What one run, or one file of runs, holds."""

    name: str
    rows: tuple[Row, ...]

    @property
    def about(self) -> str:
        """The file that the first of them measured, and when."""
        told = [self.rows[0].get(field) for field in ("model_filename", "test_time")]
        return ", ".join(one for one in told if isinstance(one, str))


@dataclass(frozen=True, slots=True)
class Match:
    """One test of both, and what differs between them: field, A's value, B's."""

    a: Row
    b: Row

    def differing(
        self, fields: Sequence[str] = (*TEST, *MACHINE, *ABOUT)
    ) -> list[tuple[str, Any, Any]]:
        """Of `fields` those that are not the same."""
        values = [(field, value(self.a, field), value(self.b, field)) for field in fields]
        return [one for one in values if one[1] != one[2]]


def read(text: str, find: Callable[[int], Row]) -> Saved | None:
    """What a word of the command line names: a number of the history, which `find` looks up, or a
    file of `bench -o json` (jsonl too). None: neither. Raises UserError for a file that cannot be
    read or holds no run.
    """
    if text.isdecimal() and text.isascii() and len(text) < 19:
        return Saved(f"run {text}", (checked(find(int(text)), f"run {text}"),))
    path = Path(text)
    if path.suffix not in (".json", ".jsonl"):
        return None
    rows = tuple(checked(row, text) for row in _documents(path))
    if not rows:
        raise UserError(f"{text} holds no run", hint="llmcli bench REF -o json > FILE makes one")
    return Saved(path.name, rows)


def checked(row: Any, where: str) -> Row:
    """A run that can be compared: whole numbers, words and rates are what they should be. Raises
    UserError.
    """
    rates = row.get("samples_ts") if isinstance(row, Mapping) else None
    good = isinstance(rates, list) and rates and all(_rate(rate) for rate in rates)
    if good:
        known = [row[field] for field in (*TEST, *MACHINE, *ABOUT) if row.get(field) is not None]
        good = all(
            type(row.get(field)) is int and 0 <= row[field] < 2**31
            for field in ("n_prompt", "n_gen")
        )
        good = good and all(isinstance(one, str | int) or _finite(one) for one in known)
        good = good and isinstance(value(row, "n_depth"), int)
    if not good:
        raise UserError(
            f"{where} holds something that is no run of bench",
            hint="llmcli bench REF -o json > FILE",
        )
    found: Row = row
    return found


def value(row: Row, field: str) -> Any:
    """A field, or what its absence means."""
    found = row.get(field)
    return ABSENT.get(field) if found is None else found


def name(row: Row) -> str:
    """The test's name; a load has its own."""
    if row.get("load") is not None and isinstance(told := row.get("test"), str):
        return told
    test = Test(row["n_prompt"], row["n_gen"], int(value(row, "n_depth")), 0, 0, "", "", 0, 0, "")
    many = value(row, "n_parallel")
    return (
        test.name
        + (f" x{many}" if many != 1 else "")
        + (" sampled" if value(row, "sampling") else "")
    )


def match(a: Saved, b: Saved, anyway: bool) -> list[Match]:
    """The tests that both hold, where their settings differ those of the same settings if there are
    several.

    Raises UserError where there is none, or another machine measured them: `anyway` compares single
    runs whatever they are.
    """
    found = list(_pairs(a.rows, b.rows, TEST))
    if not _single(found):
        found = list(_pairs(a.rows, b.rows, (*TEST, *SETTINGS)))
    if not found and anyway and len(a.rows) == len(b.rows) == 1:
        found = [Match(a.rows[0], b.rows[0])]
    if not found or not _single(found):
        tests = [", ".join(dict.fromkeys(name(row) for row in side.rows)) for side in (a, b)]
        why = "were measured several times" if found else "are different tests"
        hint = (
            "the tests of two single runs: --anyway"
            if not found
            else "name single runs: llmcli bench history"
        )
        raise UserError(f"{a.name} ({tests[0]}) and {b.name} ({tests[1]}) {why}", hint=hint)
    others = [one for pair in found for one in pair.differing(MACHINE)]
    if others and not anyway:
        field, one, other = others[0]
        raise UserError(
            f"two machines: {field} is {one!r} in {a.name} and {other!r} in {b.name}",
            hint="--anyway compares them",
        )
    return found


def compare(a: Sequence[float], b: Sequence[float], confidence: float) -> Comparison:
    """How fast B was, in units of A, from the rates of each one's repetitions; too few where one
    was measured once.
    """
    logs = [np.log(np.asarray(rates, float)) for rates in (a, b)]
    middle = float(logs[1].mean() - logs[0].mean())
    half = math.inf
    if min(len(one) for one in logs) > 1:
        spreads = [float(one.var(ddof=1)) for one in logs]
        parts = [spread / len(one) for spread, one in zip(spreads, logs, strict=True)]
        error, moved = sum(parts), sum(max(DRIFT**2, spread) for spread in spreads)
        doubts = sum(part**2 / (len(one) - 1) for part, one in zip(parts, logs, strict=True))
        tail = (1 + confidence) / 2
        factor = student(tail, error**2 / doubts) if doubts else 0.0
        half = math.sqrt(factor**2 * error + NormalDist().inv_cdf(tail) ** 2 * moved)
    return Comparison(
        math.exp(middle),
        math.exp(middle - half),
        math.exp(middle + half),
        confidence,
        tuple(a),
        tuple(b),
    )


def _documents(path: Path) -> list[Any]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(
                f"{path} is too large for runs of bench", hint="llmcli bench REF -o json > FILE"
            )
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"cannot read {path}: {why}", hint="check the name") from None
    try:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(
            f"{path} is no JSON", hint="llmcli bench REF -o json > FILE makes one"
        ) from None
    return found if isinstance(found, list) else [found]


def _finite(value: Any) -> bool:
    """Whether it is a number as JSON has them: what part of a load's prompts is shared."""
    return type(value) is float and math.isfinite(value)


def _rate(rate: Any) -> bool:
    return type(rate) in (int, float) and 0 < rate < 1e300


def _pairs(a: Sequence[Row], b: Sequence[Row], fields: Sequence[str]) -> Iterator[Match]:
    for one in a:
        for other in b:
            if all(value(one, field) == value(other, field) for field in fields):
                yield Match(one, other)


def _single(found: Sequence[Match]) -> bool:
    """Whether no run has two partners."""
    sides = ([id(one.a) for one in found], [id(one.b) for one in found])
    return all(len(set(side)) == len(side) for side in sides)
