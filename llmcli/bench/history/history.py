"""The benchmark history: each measured test with its machine, build, model, settings, samples and
time.

Each test is a row of an SQLite file. Row numbers are never reused. If the file is damaged, it is
renamed, and all readable rows are copied to a new file.
"""

import json
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli import file_lock
from llmcli.atomic_files import make_folder
from llmcli.bench.history.database import (
    DatabaseDamagedError,
    open_database,
    run_transaction,
    schema_version,
    unused_name,
)
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay
from llmcli.units import format_current_time
from quant.json_dataclasses import parse_object
from quant.link_safety import create_temporary

MAX_DOCUMENT_CHARACTERS = 1 << 24  # of the JSON of a run; a load test lists its requests

COLUMNS = "id, time, machine, build, model, sha256, content, test, document"


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One measured test.

    `model`: the model's name as the user typed it. `sha256`: the hash of the whole model file;
    None: unknown. `content`: the `content_hash` of the model, a hash of its header and of samples
    of its weights. `test`: the name of the test, such as pp512. `document`: the JSON object that
    `bench -o json` prints. `id`: the run's number in the history; None: not saved yet.
    """

    time: str
    machine: str
    build: str
    model: str
    sha256: str | None
    content: str
    test: str
    document: Mapping[str, Any]
    id: int | None = None

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens per second of each repetition. There is at least one repetition, and all values
        are above 0.
        """
        return tuple(float(value) for value in self.document["samples_ts"])

    @property
    def samples_ns(self) -> tuple[int, ...]:
        """Nanoseconds of each repetition."""
        return tuple(int(value) for value in self.document["samples_ns"])


@dataclass(frozen=True, slots=True)
class SalvagedRuns:
    """The readable contents of a damaged file: its runs, oldest first, and the highest number that
    any run ever had.
    """

    runs: tuple[BenchRun, ...]
    highest_id: int


def history_path(config: Config) -> Path:
    """Return the path of the history file."""
    return config.data / "bench.sqlite"


class History:
    """The history file. It is created when the first run is saved. `watcher` prints warnings about
    the file.
    """

    def __init__(self, path: Path, watcher: ProgressDisplay) -> None:
        self.path, self.watcher = path, watcher

    def append(self, runs: Sequence[BenchRun]) -> list[int]:
        """Save all runs, and return their numbers in the history. If an error occurs, no run is
        saved. Raises UserError.
        """
        return self._write(lambda db: [_insert(db, run) for run in runs])

    def runs(self, *, model: str | None = None, last: int | None = None) -> list[BenchRun]:
        """Return saved runs, oldest first. `model`: only return runs whose model name contains this
        text or whose hash starts with it. `last`: return at most this many runs, the newest ones.

        If the file is damaged, return the readable runs, and print a warning. Raises UserError if
        the file cannot be accessed.
        """
        return self._read(lambda run: model is None or _has_name_or_hash(run, model), last)

    def find_run(self, number: int) -> BenchRun:
        """Return the run with this number. Raises UserError if it does not exist."""
        is_valid = number < 2**63  # the largest integer of SQLite
        runs = (
            self._read(lambda run: run.id == number, 1, "WHERE id = ?", (number,))
            if is_valid
            else []
        )
        if not runs:
            raise UserError(f"the history has no run {number}", hint="llmcli bench history")
        return runs[0]

    def bandwidth(self, machine: str) -> tuple[float | None] | None:
        """Return the saved memory bandwidth of a machine in bytes per second, in a tuple of length
        1.

        Returns `(None,)` if the measurement had no usable result, and None if there was no
        measurement.
        """
        if not self.path.exists():
            return None
        try:
            with open_database(self.path) as db:
                query = "SELECT rate FROM bandwidth WHERE machine = ?"
                row = db.execute(query, (machine,)).fetchone() if schema_version(db) else None
        except DatabaseDamagedError:
            return None
        if row is None or not (
            row[0] is None or (isinstance(row[0], float) and 0 < row[0] < math.inf)
        ):
            return None
        return (row[0],)

    def save_bandwidth(self, machine: str, rate: float | None) -> None:
        """Save the memory bandwidth of a machine in bytes per second, and replace its earlier
        value. Raises UserError.
        """
        row = (machine, format_current_time(), rate)
        self._write(
            lambda db: [
                db.execute("INSERT OR REPLACE INTO bandwidth VALUES (?, ?, ?)", row).rowcount
            ]
        )

    def _read(
        self,
        matches: Callable[[BenchRun], bool],
        last: int | None,
        where: str = "",
        values: tuple[int, ...] = (),
    ) -> list[BenchRun]:
        if not self.path.exists():
            return []
        runs: list[BenchRun] = []
        try:
            with open_database(self.path) as db:
                for run in _valid_runs(db, "DESC", where, values):
                    if matches(run):
                        runs.append(run)
                    if len(runs) == last:
                        break
        except DatabaseDamagedError as error:
            self.watcher.note(
                f"warning: {self.path} is damaged ({error}); some runs may be missing"
            )
            runs = [run for run in reversed(_salvage(self.path).runs) if matches(run)][:last]
        return runs[::-1]

    def _write(self, change: Callable[[sqlite3.Connection], list[int]]) -> list[int]:
        make_folder(self.path.parent)
        try:
            return run_transaction(self.path, change)
        except DatabaseDamagedError:
            # With the lock, only one process replaces the file. A process that waited for the lock
            # finds the new file.
            with file_lock.hold_lock(
                self.path.with_name(f"{self.path.name}.lock"), self.watcher, "the history"
            ):
                try:
                    return run_transaction(self.path, change)
                except DatabaseDamagedError as error:
                    self._set_aside(str(error))
                    return run_transaction(self.path, change)

    def _set_aside(self, why: str) -> None:
        """Rename the damaged file, and create a new file with the runs that can still be read."""
        renamed, salvaged = unused_name(self.path), _salvage(self.path)
        new_file, empty_file = create_temporary(self.path)
        empty_file.close()
        run_transaction(new_file, lambda db: _restore(db, salvaged))
        # these files belong to the damaged file, and would damage the new one
        for suffix in ("-journal", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                self.path.with_name(self.path.name + suffix).replace(
                    renamed.with_name(renamed.name + suffix)
                )
        self.path.replace(renamed)
        new_file.replace(self.path)
        self.watcher.note(
            f"warning: the history was damaged ({why}): it was moved to {renamed}, and a new"
            f" one was created with the {len(salvaged.runs)} readable runs"
        )


def _insert(db: sqlite3.Connection, run: BenchRun) -> int:
    document = json.dumps(dict(run.document))
    # a model's file name may contain bytes that are not UTF-8
    model = run.model.encode("utf-8", "backslashreplace").decode()
    values = (
        run.id,
        run.time,
        run.machine,
        run.build,
        model,
        run.sha256,
        run.content,
        run.test,
        document,
    )
    return (
        db.execute(
            f"INSERT INTO runs ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values
        ).lastrowid
        or 0
    )


def _restore(db: sqlite3.Connection, saved: SalvagedRuns) -> list[int]:
    for run in saved.runs:
        _insert(db, run)
    db.execute("DELETE FROM sqlite_sequence WHERE name = 'runs'")
    db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('runs', ?)", (saved.highest_id,))
    return []


def _valid_runs(
    db: sqlite3.Connection, order: str, where: str = "", values: tuple[int, ...] = ()
) -> Iterator[BenchRun]:
    """Yield the run of each valid row, and skip invalid rows. `order`: "ASC" or "DESC". `where`,
    `values`: an SQL condition and its parameters.
    """
    if schema_version(db):
        for row in db.execute(f"SELECT {COLUMNS} FROM runs {where} ORDER BY id {order}", values):
            run = _parse_row(*row)
            if run is not None:
                yield run


def _parse_row(number: Any, *row: Any) -> BenchRun | None:
    """Return the run of one row; None if the row is invalid. The arguments are the row's values in
    the order of COLUMNS.
    """
    *before, sha256, content, test, document = row
    if type(number) is not int or not all(
        isinstance(text, str) for text in (*before, content, test, document)
    ):
        return None
    try:
        moment, machine, build, model = before
        file_hash = sha256 if isinstance(sha256, str) else None
        parsed = parse_object(document, MAX_DOCUMENT_CHARACTERS)
        run = BenchRun(moment, machine, build, model, file_hash, content, test, parsed, number)
        rates = run.samples_ts
        is_valid = (
            all(0 < rate < math.inf for rate in rates) and len(rates) == len(run.samples_ns) > 0
        )
    except (ValueError, TypeError, LookupError):
        return None
    return run if is_valid else None


def _has_name_or_hash(run: BenchRun, text: str) -> bool:
    hashes = (run.sha256 or "", run.content)
    return text.lower() in run.model.lower() or (
        len(text) >= 6 and any(file_hash.startswith(text) for file_hash in hashes)
    )


def _salvage(path: Path) -> SalvagedRuns:
    """Read as many runs as possible from a damaged file. The table is read from its start until an
    error occurs, and then from its end.
    """
    by_number: dict[int, BenchRun] = {}
    highest = 0
    for order in ("ASC", "DESC"):
        with suppress(DatabaseDamagedError), open_database(path, tolerate_truncation=True) as db:
            for run in _valid_runs(db, order):
                by_number[run.id or 0] = run
    with suppress(DatabaseDamagedError), open_database(path, tolerate_truncation=True) as db:
        row = db.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'runs'").fetchone()
        highest = row[0] if type(row[0]) is int and row[0] < 2**62 else 0
    return SalvagedRuns(
        tuple(by_number[number] for number in sorted(by_number)), max([highest, *by_number])
    )
