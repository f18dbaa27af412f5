"""The SQLite file of the history: opened with care, changed in one transaction, and what may be
wrong with it.

The file is input like any other. It knows the tables and nothing of what is in their rows.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from llmcli.errors import UserError

SCHEMA = 1
WAIT = 10.0  # seconds for another writer, who needs milliseconds
TABLES = (
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY AUTOINCREMENT, time TEXT NOT NULL, machine TEXT NOT NULL, build TEXT NOT NULL,
        model TEXT NOT NULL, sha256 TEXT, content TEXT NOT NULL, test TEXT NOT NULL, document TEXT NOT NULL)""",
    "CREATE TABLE bandwidth (machine TEXT PRIMARY KEY, time TEXT NOT NULL, rate REAL)",
)
NOW_ONLY = {  # what keeps SQLite from working now and says nothing of the file
    sqlite3.SQLITE_BUSY: "another program is using it",
    sqlite3.SQLITE_LOCKED: "another program is using it",
    sqlite3.SQLITE_READONLY: "it cannot be written",
    sqlite3.SQLITE_PERM: "it may not be read",
    sqlite3.SQLITE_AUTH: "it may not be read",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_IOERR: "the disk does not answer",
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_NOLFS: "the disk cannot hold it",
}


class Damaged(Exception):
    """The file is no database, or not whole."""


@contextmanager
def opened(path: Path, *, make: bool = False, torn: bool = False) -> Iterator[sqlite3.Connection]:
    """The database of our schema; empty (no tables) where nothing was ever kept. `torn`: read it
    without its end, too.

    Raises Damaged, also for what goes wrong inside the block, and UserError for what is not the
    file's fault.
    """
    try:
        # "rw" for readers, too: what a killed writer left is undone by whoever comes next.
        name = f"{path.absolute().as_uri()}?mode={'rwc' if make else 'rw'}"
        with closing(sqlite3.connect(name, uri=True, timeout=WAIT, isolation_level=None)) as db:
            db.text_factory = lambda raw: raw.decode("utf-8", "replace")
            db.execute("PRAGMA trusted_schema = OFF")
            # else a file shorter than its head says is refused whole (sqlite's btree.c, lockBtree)
            if torn:
                db.execute("PRAGMA writable_schema = ON")
            if version(db) > SCHEMA:
                raise UserError(
                    f"{path} was written by a newer llmcli (its form is {version(db)}, this one knows {SCHEMA})",
                    hint="update llmcli, or set LLMCLI_HOME to another folder",
                )
            yield db
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter: of a garbled schema
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code not in NOW_ONLY:
            raise Damaged(str(error)) from None
        raise UserError(
            f"the history {path} cannot be used now: {NOW_ONLY[code]}",
            hint="try again, or check the folder's room and permissions",
        ) from None


def changed(path: Path, change: Callable[[sqlite3.Connection], list[int]]) -> list[int]:
    """What `change` gives, in one transaction that waits for others'; raises as `opened`."""
    with opened(path, make=True) as db:
        db.execute("BEGIN IMMEDIATE")
        # What is damaged elsewhere would let a row be written that nobody finds: some 50 ms for
        # 5,000 runs.
        if (found_wrong := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise Damaged(" ".join(str(found_wrong).split()))
        if not version(db):
            for table in TABLES:
                db.execute(table)
            db.execute(f"PRAGMA user_version = {SCHEMA}")
        found = change(db)
        db.execute("COMMIT")
        return found


def version(db: sqlite3.Connection) -> int:
    """The schema's; 0: there is none yet."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def free_name(path: Path) -> Path:
    """A name for a damaged file, beside it, that nobody has."""
    stem = f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    names = (path.with_name(stem + (f"-{count}" if count else "")) for count in range(1000))
    return next(name for name in names if not name.exists())
