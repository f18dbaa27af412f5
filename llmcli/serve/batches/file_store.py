"""The folder of a server's files and batches. Everything in it survives a restart.

A file is `ID.content` with its description in `ID.json`; a batch is a description alone. While a
batch runs, its finished lines are in a journal (llmcli/batch/journal.py). Descriptions are read when
the store is opened. Only one process may use a folder.

Other users may be able to create files in the folder: symbolic links in it are never followed, and
files that do not have the names of this store are never touched.
"""

import json
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from llmcli.api.errors import ApiError
from llmcli.atomic_files import (
    make_folder,
    require_writable,
    sync_folder,
    write_atomically,
    write_error,
)
from llmcli.errors import UserError
from llmcli.file_lock import hold_lock
from llmcli.serve.batches.records import KEPT_SECONDS, StoredBatch, StoredFile
from quant.json_dataclasses import encode_value, parse_json
from quant.link_safety import open_without_links

MAX_FILE_BYTES = 200_000_000  # OpenAI's limit for the input of a batch
MAX_FILES, MAX_BATCHES = 10_000, 10_000
MAX_RECORD_BYTES = 1 << 20  # of a description
FILE_PREFIX, BATCH_PREFIX = "file-", "batch_"
CONTENT_SUFFIX, RECORD_SUFFIX, PART_SUFFIX = ".content", ".json", ".part"
ID_DIGITS = 24
LOCK_NAME = ".lock"
RECORD_NAME = re.compile(r"(file-|batch_)[0-9a-f]{24}\.json")
# what a process that was killed has left: unfinished uploads, temporary files of descriptions
REMAINS_NAME = re.compile(r"\.?(file-|batch_)[0-9a-f]{24}(\.json\.[0-9a-f]+)?\.part")
FOLDER_MODE, FILE_MODE = 0o700, 0o600

Record = TypeVar("Record", StoredFile, StoredBatch)


class FileStore:
    """The files and batches in a folder. `max_bytes`: the limit of all files together. `files`,
    `batches`: the descriptions by id, in the order of their creation.

    Methods may be called from any thread.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.files: dict[str, StoredFile] = {}
        self.batches: dict[str, StoredBatch] = {}
        self.n_bytes = 0  # of all files, of uploads so far, and of the journals of running batches
        self._lock = threading.Lock()

    def content_path(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self.folder / f"{file_id}{CONTENT_SUFFIX}"

    def open_content(self, file_id: str) -> BinaryIO:
        """Open the content of a file for reading. Raises OSError."""
        return open_without_links(self.content_path(file_id), "rb")

    def journal_path(self, batch_id: str) -> Path:
        """Return the path of the output for which the journal of a batch is named."""
        return self.folder / f"{batch_id}.jsonl"

    def load(self) -> None:
        """Read the descriptions in the folder. Those that are damaged, and content without a
        description, are left where they are. What a killed process has left is removed.
        """
        files, batches = list[StoredFile](), list[StoredBatch]()
        for path in self.folder.iterdir():
            if REMAINS_NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)
            elif RECORD_NAME.fullmatch(path.name):
                if path.name.startswith(FILE_PREFIX):
                    files += _read_record(StoredFile, path)
                else:
                    batches += _read_record(StoredBatch, path)
        self.files = {
            file.id: file
            for file in sorted(files, key=lambda file: (file.created_at, file.id))
            if _is_regular(self.content_path(file.id))
        }
        self.batches = {
            batch.id: batch
            for batch in sorted(batches, key=lambda batch: (batch.created_at, batch.id))
        }
        self.n_bytes = sum(max(0, file.n_bytes) for file in self.files.values())
        for batch in batches:
            if not batch.is_open and batch.status != "failed":
                self.remove_journal(batch.id)

    def begin_upload(self, *, file_id: str = "", is_limited: bool = True) -> "Upload":
        """Return a new file to write to. Raises ApiError if the store has too many files, and
        UserError if the file cannot be written. `file_id`: by default a new one; a file that has it
        is replaced at the end. `is_limited`: whether the limits of the store and of a file's size
        apply.
        """
        self.remove_expired()
        if is_limited and len(self.files) >= MAX_FILES:
            raise ApiError(f"there are {MAX_FILES:,} files; delete some", 413, code="storage_full")
        return Upload(self, file_id or f"{FILE_PREFIX}{uuid.uuid4().hex[:ID_DIGITS]}", is_limited)

    def reserve(self, n_bytes: int, *, is_limited: bool = True) -> None:
        """Count bytes that are written. A negative number: they were removed. Raises ApiError if
        they exceed the limit and it applies (`is_limited`).
        """
        with self._lock:
            if is_limited and n_bytes > 0 and self.n_bytes + n_bytes > self.max_bytes:
                raise ApiError(
                    f"the files of this server would exceed {self.max_bytes:,} bytes;"
                    " delete files that are no longer needed",
                    413,
                    code="storage_full",
                )
            self.n_bytes += n_bytes

    def add_file(self, file: StoredFile) -> None:
        """Store the description of a file whose content is in place and counted. Raises UserError
        if it cannot be written.
        """
        self._write_record(file)
        if earlier := self.files.get(file.id):
            self.reserve(-earlier.n_bytes)
        self.files[file.id] = file

    def add_batch(self, batch: StoredBatch) -> None:
        """Store a new batch. Raises ApiError if there are too many, and UserError if it cannot be
        written.
        """
        self.remove_expired()
        if len(self.batches) >= MAX_BATCHES:
            raise ApiError(f"there are {MAX_BATCHES:,} batches", 413, code="storage_full")
        self._write_record(batch)
        self.batches[batch.id] = batch

    def save_batch(self, batch: StoredBatch) -> None:
        """Write a new state of a batch to the disk. Raises UserError."""
        self._write_record(batch)

    def delete_file(self, file_id: str) -> None:
        """Remove a file. Raises UserError if this is not possible."""
        file = self.files.pop(file_id, None)
        try:
            # without its description, content is no file after a restart
            for path in (self._record_path(file_id), self.content_path(file_id)):
                path.unlink(missing_ok=True)
        except OSError as error:
            if file:
                self.files[file_id] = file
            raise UserError(f"cannot delete {file_id}: {error.strerror}") from None
        if file:
            self.reserve(-max(0, file.n_bytes))

    def needed_files(self) -> set[str]:
        """Return the ids of the files that an open batch reads."""
        batches = list(self.batches.values())
        return {batch.input_file_id for batch in batches if batch.is_open}

    def remove_journal(self, batch_id: str) -> None:
        """Remove the journal of a batch."""
        with suppress(OSError):
            for path in self.folder.glob(f".{batch_id}.jsonl.*"):
                path.unlink(missing_ok=True)

    def remove_expired(self) -> None:
        """Remove the files whose time is over, and closed batches after KEPT_SECONDS. The input of
        an open batch stays.
        """
        now = time.time()
        needed = self.needed_files()
        for file in list(self.files.values()):
            if file.expires_at is not None and file.expires_at < now and file.id not in needed:
                with suppress(UserError):
                    self.delete_file(file.id)
        for batch in list(self.batches.values()):
            if not batch.is_open and batch.created_at + KEPT_SECONDS < now:
                with suppress(OSError):
                    self._record_path(batch.id).unlink(missing_ok=True)
                    self.batches.pop(batch.id, None)
                    self.remove_journal(batch.id)

    def _record_path(self, record_id: str) -> Path:
        return self.folder / f"{record_id}{RECORD_SUFFIX}"

    def _write_record(self, record: StoredFile | StoredBatch) -> None:
        raw = json.dumps(encode_value(record)).encode()
        write_atomically(self._record_path(record.id), raw, mode=FILE_MODE)


class Upload:
    """A new file of a store while it is written. Call finish() or abort()."""

    def __init__(self, store: FileStore, file_id: str, is_limited: bool) -> None:
        self._store, self.id, self._is_limited, self.n_bytes = store, file_id, is_limited, 0
        self._part = store.folder / f"{file_id}{PART_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._stream: BinaryIO = os.fdopen(os.open(self._part, flags, FILE_MODE), "wb")
        except OSError as error:
            raise write_error(self._part, error) from None

    def write(self, chunk: bytes) -> None:
        """Append bytes. Raises ApiError if the file or all files become too large, and UserError if
        the disk is full.
        """
        if self._is_limited and self.n_bytes + len(chunk) > MAX_FILE_BYTES:
            raise ApiError(f"a file may have {MAX_FILE_BYTES:,} bytes at most", 413, param="file")
        self._store.reserve(len(chunk), is_limited=self._is_limited)
        self.n_bytes += len(chunk)
        try:
            self._stream.write(chunk)
        except OSError as error:
            raise write_error(self._part, error) from None

    def finish(self, filename: str, purpose: str, owner: str, expires_at: int | None) -> StoredFile:
        """Make the file one of the store, and return its description. Raises UserError if the disk
        is full; the file is discarded then.
        """
        file = StoredFile(
            self.id, filename, purpose, self.n_bytes, int(time.time()), owner, expires_at
        )
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._part.replace(self._store.content_path(self.id))
            sync_folder(self._store.folder)
            self._store.add_file(file)
        except OSError as error:
            self.abort()
            raise write_error(self._part, error) from None
        except UserError:
            self.abort()
            self._store.content_path(self.id).unlink(missing_ok=True)
            raise
        return file

    def abort(self) -> None:
        """Discard the file."""
        with suppress(OSError):
            self._stream.close()
        with suppress(OSError):
            self._part.unlink(missing_ok=True)
        self._store.reserve(-self.n_bytes)
        self.n_bytes = 0


def _read_record(kind: type[Record], path: Path) -> list[Record]:
    """Return the description in a file; nothing if it is damaged, or does not have the file's
    name.
    """
    try:
        with open_without_links(path, "rb") as stream:
            record = parse_json(kind, stream.read(MAX_RECORD_BYTES + 1), MAX_RECORD_BYTES)
    except (OSError, ValueError):
        return []
    return [record] if f"{record.id}{RECORD_SUFFIX}" == path.name else []


def _is_regular(path: Path) -> bool:
    """Return whether a path is a regular file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def require_folder(folder: Path) -> None:
    """Raise UserError if a store in this folder could not be opened now."""
    with _locked_folder(folder):
        pass


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Exclude other processes from the folder of a store during the `with` block. A missing folder
    is created; only this user can read it, because its files are those of clients. Raises UserError
    if it cannot be written, or if another process uses it.
    """
    try:
        if not folder.is_dir():
            make_folder(folder.parent)
            folder.mkdir(FOLDER_MODE, exist_ok=True)
        require_writable(folder / "probe")
    except OSError as error:
        raise write_error(folder, error) from None
    with hold_lock(folder / LOCK_NAME) as is_held:
        if not is_held:
            raise UserError(
                f"another server keeps its files in {folder}", hint="choose another --files-folder"
            )
        yield


@contextmanager
def open_store(folder: Path, max_bytes: int) -> Iterator[FileStore]:
    """Open the store in a folder for the `with` block, and create the folder if it is missing.
    Raises UserError if the folder cannot be written, or if another process uses it.
    """
    with _locked_folder(folder):
        store = FileStore(folder, max_bytes)
        try:
            store.load()
        except OSError as error:
            raise write_error(folder, error) from None
        store.remove_expired()
        yield store
