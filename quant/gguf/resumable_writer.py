"""Writes a GGUF file under a temporary name next to its final one, with a journal from which an
interrupted run resumes.

Bytes are appended in the file's order, so a single running SHA-256 is enough. Each journal line
records the position and the digest of all bytes before it, and the last digest is that of the whole
file.
"""

import contextlib
import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from quant.disk_space import require_disk_space, reusable_bytes
from quant.errors import DamagedSourceError, UserError
from quant.gguf.header import read_file_header
from quant.gguf.layout import FileLayout, TensorSlot

BLOCK_BYTES = 1 << 20  # bytes that are read at a time to verify an earlier run's bytes
JOURNAL_SECONDS = 2.0  # least seconds between journal lines within a slab
# after this many bytes, written data is flushed to the disk in the background
FLUSH_BYTES = 1 << 25


class ResumableWriter:
    """Writes `.OUT.part` and `.OUT.journal` beside `out`, and renames the part when it is complete.

    `position` is the number of bytes written so far, of which an earlier run wrote the first
    `resumed_bytes`. A journal line records the SHA-256 of all bytes before a position. A resumed
    run verifies the part's bytes against it. Bytes that a power cut destroyed are detected and
    written again, so nothing has to be flushed before the end.
    """

    def __init__(self, out: Path, layout: FileLayout, identity: dict[str, str]) -> None:
        self.out, self.layout = out, layout
        self.part_path = out.with_name(f".{out.name}.part")
        self.journal_path = out.with_name(f".{out.name}.journal")
        self.identity = {**identity, "header": hashlib.sha256(layout.header).hexdigest()}
        self.position, self.resumed_bytes, self.sha = 0, 0, hashlib.sha256()
        # Number of bytes that were given to the disk, and the latest flush.
        self.flushed, self.pending_flush = 0, Future[None]()
        self.pending_flush.set_result(None)
        self.recorded_at = 0.0

    @contextlib.contextmanager
    def open(self) -> Iterator["ResumableWriter"]:
        """Resume an interrupted run's file, or begin a new one. Only one process at a time may
        write the file.

        If the block ends early, the part stays for a resume, unless the block raises
        DamagedSourceError. Raises UserError if the file cannot be written.
        """
        _require_regular_files(self.part_path, self.journal_path)
        with _translate_errors(self.out), self.journal_path.open("a+b") as journal:
            _lock(journal, self.out)
            self.log = journal
            self._resume()
            self.resumed_bytes = self.position
            self._check_disk_space()
            with (
                self.part_path.open("r+b" if self.position else "wb") as data,
                ThreadPoolExecutor(1, "flush") as disk,
            ):
                self.data, self.disk = data, disk
                data.seek(self.position)
                if not self.position:
                    journal.truncate(0)
                    self._write_line(dict(self.identity))
                    data.truncate(self.layout.nbytes)
                    self.append(self.layout.header)
                try:
                    yield self
                except DamagedSourceError:
                    self.part_path.unlink()
                    self.journal_path.unlink()
                    raise

    def append(self, data: bytes | memoryview) -> None:
        """Append the next bytes of the file."""
        self.data.write(data)
        self.sha.update(data)
        self.position += memoryview(data).nbytes
        if self.position - self.flushed >= FLUSH_BYTES and self.pending_flush.done():
            self._start_flush()

    def pad(self, offset: int) -> None:
        """Append zeros until the file has `offset` bytes."""
        assert offset >= self.position, (offset, self.position)
        if offset > self.position:
            self.append(bytes(offset - self.position))

    def checkpoint(self, *, now: bool = True) -> None:
        """Record the position in the journal; with `now` false, only if the last record is at least
        JOURNAL_SECONDS old.
        """
        if now or time.monotonic() - self.recorded_at > JOURNAL_SECONDS:
            self.data.flush()
            self._write_line({"bytes": self.position, "sha256": self.sha.hexdigest()})
            self.recorded_at = time.monotonic()

    def finish(self) -> str:
        """Flush the file, check its header, rename it to its final name, and return its SHA-256."""
        self.pad(self.layout.nbytes)
        self._start_flush()
        written = read_file_header(self.part_path)
        slots = [TensorSlot(t.name, t.shape, t.type, t.offset, t.nbytes) for t in written.tensors]
        assert tuple(slots) == self.layout.slots, (
            "the file read back is not the file that was planned"
        )
        self.pending_flush.result()
        self.part_path.replace(self.out)
        self.journal_path.unlink()
        sync_folder(self.out.parent)
        return self.sha.hexdigest()

    def _start_flush(self) -> None:
        """Start flushing the written bytes to the disk in the background. Raises the error of the
        previous flush if it failed.
        """
        self.pending_flush.result()
        self.data.flush()
        self.flushed, self.pending_flush = (
            self.position,
            self.disk.submit(os.fsync, self.data.fileno()),
        )

    def _write_line(self, line: Mapping[str, str | int]) -> None:
        self.log.write(json.dumps(line).encode() + b"\n")
        self.log.flush()

    def _resume(self) -> None:
        """Verify the bytes of an earlier run, and continue after the last journal line that matches
        them.
        """
        lines = _lines(self.log)
        end, first = next(lines, (0, None))
        if first != self.identity or not self.part_path.is_file():
            return
        with self.part_path.open("rb") as data:
            if data.seek(0, 2) != self.layout.nbytes:
                return
            data.seek(0)
            if data.read(len(self.layout.header)) != self.layout.header:
                return
            sha = hashlib.sha256(self.layout.header)
            for after, line in lines:
                if not _matches_journal(data, sha, line) or not self.layout.ends_with_row(
                    data.tell()
                ):
                    break
                end, self.position, self.sha = after, data.tell(), sha.copy()
        self.log.truncate(end)

    def _check_disk_space(self) -> None:
        """Raise UserError if the disk has too little space, before the first byte is written."""
        try:
            require_disk_space(
                self.out.parent,
                max(0, self.layout.nbytes - reusable_bytes([self.part_path])),
                f"{self.out.name} needs",
                "or choose a path on another disk with -o",
            )
        except UserError:
            # A journal without a part is not deleted, because it may belong to a run that can be
            # resumed.
            if not self.part_path.exists():
                self.journal_path.unlink()
            raise


def _lines(journal: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the journal's complete lines, each with the offset of its end. A crash may have cut the
    last line.
    """
    journal.seek(0)
    end = 0
    for line in journal.readlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(value, dict) or not line.endswith(b"\n"):
            return
        end += len(line)
        yield end, value


def _matches_journal(data: BinaryIO, sha: "hashlib._Hash", line: Mapping[str, Any]) -> bool:
    """Read the data up to the position of a journal line; return whether the digest matches the
    line's.
    """
    length = line.get("bytes")
    if type(length) is not int or length < data.tell():
        return False
    while block := data.read(min(length - data.tell(), BLOCK_BYTES)):
        sha.update(block)
    return data.tell() == length and sha.hexdigest() == line.get("sha256")


@contextlib.contextmanager
def _translate_errors(out: Path) -> Iterator[None]:
    """Raise errors of the file system as UserError; the part stays for a resume."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(
                f"the disk is full: {out.name} could not be finished",
                hint="free some space and repeat the command: it resumes where it stopped",
            ) from None
        raise UserError(
            f"{out} cannot be written: {error.strerror or error}",
            hint="choose another output path with -o",
        ) from None


def _require_regular_files(*files: Path) -> None:
    """Raise UserError if the part or the journal exists as a link or a device, which must not be
    written to.
    """
    for file in files:
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise UserError(
                f"{file} is not a regular file",
                hint="remove it, or choose another output path with -o",
            )


def _lock(journal: BinaryIO, out: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not available on Windows, where two processes can write the same file
        return
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(
            f"another process is writing {out}", hint="wait for it, or choose another name with -o"
        ) from None
    # No links means that another process finished and removed the journal before this one got the
    # lock.
    if not os.fstat(journal.fileno()).st_nlink:
        raise UserError(f"another process has just written {out}", hint="repeat the command")


def sync_folder(folder: Path) -> None:
    """Flush a folder, on systems that support it, so that a rename in it survives a power cut."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
