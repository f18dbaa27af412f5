"""The SQLite file of the benchmark history: opening it, its tables, transactions, and the detection
of damage.

The file is untrusted input. This module does not interpret the contents of rows.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from llmcli.errors import UserError

SCHEMA_VERSION = 1
LOCK_SECONDS = 10.0  # seconds to wait for another writer
TABLE_STATEMENTS = (
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY AUTOINCREMENT, time TEXT NOT NULL, machine TEXT NOT NULL,
        build TEXT NOT NULL, model TEXT NOT NULL, sha256 TEXT, content TEXT NOT NULL,
        test TEXT NOT NULL, document TEXT NOT NULL)""",
    "CREATE TABLE bandwidth (machine TEXT PRIMARY KEY, time TEXT NOT NULL, rate REAL)",
)
# errors that prevent access at the moment, but do not mean that the file is damaged
TEMPORARY_ERRORS = {
    sqlite3.SQLITE_BUSY: "another program is using it",
    sqlite3.SQLITE_LOCKED: "another program is using it",
    sqlite3.SQLITE_READONLY: "it is read-only",
    sqlite3.SQLITE_PERM: "permission denied",
    sqlite3.SQLITE_AUTH: "permission denied",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_IOERR: "disk I/O error",
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_NOLFS: "the file system does not support files of this size",
}


class DatabaseDamagedError(Exception):
    """The history file is damaged, or it is not an SQLite database."""


@contextmanager
def open_database(
    path: Path, *, create: bool = False, tolerate_truncation: bool = False
) -> Iterator[sqlite3.Connection]:
    """Open the database for the block. A database that was never written to has no tables.

    `create`: create the file if it is missing. `tolerate_truncation`: also open a file that is
    shorter than its header states. Raises DatabaseDamagedError if the file is damaged, even if a
    statement inside the block discovers the damage. Raises UserError if the file cannot be accessed
    or belongs to a newer version of llmcli.
    """
    try:
        # The file is opened for writing even if it is only read, so that SQLite can undo the
        # unfinished write of a killed process.
        name = f"{path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
        with closing(
            sqlite3.connect(name, uri=True, timeout=LOCK_SECONDS, isolation_level=None)
        ) as db:
            db.text_factory = lambda raw: raw.decode("utf-8", "replace")
            db.execute("PRAGMA trusted_schema = OFF")
            # without this, SQLite refuses a truncated file entirely (btree.c, lockBtree)
            if tolerate_truncation:
                db.execute("PRAGMA writable_schema = ON")
            if schema_version(db) > SCHEMA_VERSION:
                raise UserError(
                    f"{path} was written by a newer llmcli (schema {schema_version(db)}; this version"
                    f" supports {SCHEMA_VERSION})",
                    hint="update llmcli, or set LLMCLI_HOME to another folder",
                )
            yield db
    # SQLite raises UnicodeDecodeError if the schema is garbled
    except (sqlite3.Error, UnicodeDecodeError) as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code not in TEMPORARY_ERRORS:
            raise DatabaseDamagedError(str(error)) from None
        raise UserError(
            f"the history {path} cannot be used now: {TEMPORARY_ERRORS[code]}",
            hint="try again, or check the folder's free space and permissions",
        ) from None


def run_transaction(path: Path, change: Callable[[sqlite3.Connection], list[int]]) -> list[int]:
    """Call `change` with the database in one transaction, and return what it returns. Creates the
    file and its tables if needed, and waits for other writers. Raises the same errors as
    `open_database`.
    """
    with open_database(path, create=True) as db:
        db.execute("BEGIN IMMEDIATE")
        # In a damaged file, later queries might not find a new row.
        if (damage := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise DatabaseDamagedError(" ".join(str(damage).split()))
        if not schema_version(db):
            for table in TABLE_STATEMENTS:
                db.execute(table)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        result = change(db)
        db.execute("COMMIT")
        return result


def schema_version(db: sqlite3.Connection) -> int:
    """Return the schema version of the database, 0 if it has no schema yet."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def unused_name(path: Path) -> Path:
    """Return the path of a file that does not exist yet, to which a damaged file at `path` can be
    renamed.
    """
    stem = f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    names = (path.with_name(stem + (f"-{count}" if count else "")) for count in range(1000))
    return next(name for name in names if not name.exists())
