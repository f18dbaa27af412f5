"""Measured runs, kept: which machine, build, model and settings gave which samples, and when.

A run is a row with a number that is never given again; its `document` is the test as `bench -o
json` tells it. A damaged file is set aside under another name, with all that can be read of it
carried over. It measures nothing.
"""

import json
import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.bench.database import Damaged, changed, free_name, opened, version
from llmcli.catalog import store
from llmcli.catalog.partial import make_folder
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import Watcher

COLUMNS = "id, time, machine, build, model, sha256, content, test, document"


@dataclass(frozen=True, slots=True)
class Run:
    """One test that was measured. `model` is its name as it was typed, `sha256` its file's where
    that is known, and `content` the fingerprint that every file has (runtime/identity.py); `test`
    is its name, as pp512. `id` None: not kept yet.
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
        """Tokens per second, repetition by repetition: at least one, each above 0."""
        return tuple(float(value) for value in self.document["samples_ts"])

    @property
    def samples_ns(self) -> tuple[int, ...]:
        """Nanoseconds of each repetition."""
        return tuple(int(value) for value in self.document["samples_ns"])


@dataclass(frozen=True, slots=True)
class Salvage:
    """What a damaged file still gives: its runs, oldest first, and the highest number it had given."""

    runs: tuple[Run, ...]
    highest: int


def path(config: Config) -> Path:
    """Where the history is."""
    return config.data / "bench.sqlite"


def now() -> str:
    """The time as it is kept, as llama-bench writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class History:
    """The history in one file, which is made when something is first kept. `watcher` is told what
    happened to it.
    """

    def __init__(self, path: Path, watcher: Watcher) -> None:
        self.path, self.watcher = path, watcher

    def append(self, runs: Sequence[Run]) -> list[int]:
        """Keep runs, all or none; their numbers. Raises UserError where that cannot be: the file is
        as it was.
        """
        return self._write(lambda db: [_insert(db, run) for run in runs])

    def runs(self, *, model: str | None = None, last: int | None = None) -> list[Run]:
        """Kept runs, the oldest first: of those whose model's name has `model` in it, or whose hash
        begins with it, the `last`. Of a damaged file what it still gives; the watcher is told.
        Raises UserError.
        """
        return self._read(lambda run: model is None or _named(run, model), last)

    def find(self, number: int) -> Run:
        """The run of that number; raises UserError where there is none."""
        known = number < 2**63  # SQLite's largest
        found = (
            self._read(lambda run: run.id == number, 1, "WHERE id = ?", (number,)) if known else []
        )
        if not found:
            raise UserError(
                f"the history has no run {number}", hint="llmcli bench history lists them"
            )
        return found[0]

    def bandwidth(self, machine: str) -> tuple[float | None] | None:
        """What was measured of a machine's memory: bytes a second, or that it cannot be known.
        None: nothing yet.
        """
        if not self.path.exists():
            return None
        try:
            with opened(self.path) as db:
                asked = "SELECT rate FROM bandwidth WHERE machine = ?"
                row = db.execute(asked, (machine,)).fetchone() if version(db) else None
        except Damaged:
            return None
        if row is None or not (
            row[0] is None or (isinstance(row[0], float) and 0 < row[0] < math.inf)
        ):
            return None
        return (row[0],)

    def keep_bandwidth(self, machine: str, rate: float | None) -> None:
        """Keep a measurement in place of an earlier one; raises UserError."""
        row = (machine, now(), rate)
        self._write(
            lambda db: [
                db.execute("INSERT OR REPLACE INTO bandwidth VALUES (?, ?, ?)", row).rowcount
            ]
        )

    def _read(
        self,
        wanted: Callable[[Run], bool],
        last: int | None,
        where: str = "",
        values: tuple[int, ...] = (),
    ) -> list[Run]:
        if not self.path.exists():
            return []
        found: list[Run] = []
        try:
            with opened(self.path) as db:
                for run in _rows(db, "DESC", where, values):
                    if wanted(run):
                        found.append(run)
                    if len(found) == last:
                        break
        except Damaged as error:
            self.watcher.note(
                f"warning: {self.path} is damaged ({error}): there may have been more runs than these"
            )
            found = [run for run in reversed(_salvage(self.path).runs) if wanted(run)][:last]
        return found[::-1]

    def _write(self, change: Callable[[sqlite3.Connection], list[int]]) -> list[int]:
        make_folder(self.path.parent)
        try:
            return changed(self.path, change)
        except Damaged:
            # One sets it aside; who comes at the same time finds a good file when the lock is free.
            with store.locked(
                self.path.with_name(f"{self.path.name}.lock"), self.watcher, "the history"
            ):
                try:
                    return changed(self.path, change)
                except Damaged as error:
                    self._set_aside(str(error))
                    return changed(self.path, change)

    def _set_aside(self, why: str) -> None:
        """Give a damaged file another name, and begin anew with what can be read of it."""
        aside, saved = free_name(self.path), _salvage(self.path)
        fresh = self.path.with_name(f".{self.path.name}.new")
        fresh.unlink(missing_ok=True)
        changed(fresh, lambda db: _restore(db, saved))
        for tail in (
            "-journal",
            "-wal",
            "-shm",
        ):  # they belong to the file that goes, and would spoil the new one
            with suppress(FileNotFoundError):
                self.path.with_name(self.path.name + tail).replace(
                    aside.with_name(aside.name + tail)
                )
        self.path.replace(aside)
        fresh.replace(self.path)
        self.watcher.note(
            f"warning: the history was damaged ({why}): it is kept as {aside}, and a new one begins with the "
            f"{len(saved.runs)} runs that could be read"
        )


def _insert(db: sqlite3.Connection, run: Run) -> int:
    document = json.dumps(dict(run.document))
    model = run.model.encode(
        "utf-8", "backslashreplace"
    ).decode()  # the name of a file may be no UTF-8
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


def _restore(db: sqlite3.Connection, saved: Salvage) -> list[int]:
    for run in saved.runs:
        _insert(db, run)
    db.execute("DELETE FROM sqlite_sequence WHERE name = 'runs'")
    db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('runs', ?)", (saved.highest,))
    return []


def _rows(
    db: sqlite3.Connection, order: str, where: str = "", values: tuple[int, ...] = ()
) -> Iterator[Run]:
    """All rows that are runs; what is none is passed over."""
    if version(db):
        for row in db.execute(f"SELECT {COLUMNS} FROM runs {where} ORDER BY id {order}", values):
            run = _run(*row)
            if run is not None:
                yield run


def _run(number: Any, *row: Any) -> Run | None:
    *before, sha256, content, test, document = row
    if type(number) is not int or not all(
        isinstance(text, str) for text in (*before, content, test, document)
    ):
        return None
    try:
        moment, machine, build, model = before
        known = sha256 if isinstance(sha256, str) else None
        told = json.loads(document)
        json.dumps(told, allow_nan=False)  # numbers that no JSON document may have are refused
        run = Run(moment, machine, build, model, known, content, test, told, number)
        rates = run.samples_ts
        good = all(0 < rate < math.inf for rate in rates) and len(rates) == len(run.samples_ns) > 0
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError):
        return None
    return run if good else None


def _named(run: Run, wanted: str) -> bool:
    hashes = (run.sha256 or "", run.content)
    return wanted.lower() in run.model.lower() or (
        len(wanted) >= 6 and any(one.startswith(wanted) for one in hashes)
    )


def _salvage(path: Path) -> Salvage:
    """What can be read from either end of a damaged file."""
    found: dict[int, Run] = {}
    highest = 0
    for order in ("ASC", "DESC"):
        with suppress(Damaged), opened(path, torn=True) as db:
            for run in _rows(db, order):
                found[run.id or 0] = run
    with suppress(Damaged), opened(path, torn=True) as db:
        row = db.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'runs'").fetchone()
        highest = row[0] if type(row[0]) is int and row[0] < 2**62 else 0
    return Salvage(tuple(found[number] for number in sorted(found)), max([highest, *found]))
