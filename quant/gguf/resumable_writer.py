"""Writes a GGUF file under a temporary name next to its final one. An interrupted run can be
resumed from a journal.

Bytes are appended in the file's order, so that one running SHA-256 covers them. Each line of the
journal records a position and the SHA-256 of all bytes before the position. The last digest is that
of the whole file.
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
from quant.json_dataclasses import parse_object
from quant.link_safety import open_without_links

BLOCK_BYTES = 1 << 20  # bytes that are read at a time to verify an earlier run's bytes
JOURNAL_SECONDS = 2.0  # minimum time between journal lines, except at the end of a slab
MAX_LINE_BYTES = 1 << 20  # of a line of the journal
FLUSH_BYTES = 1 << 25  # bytes that are written before a flush to the disk is started


class ResumableWriter:
    """Writes the bytes of the new file to `.OUT.part` in the folder of `out`, keeps a journal in
    `.OUT.journal`, and renames the part to `out` when it is complete.

    `position` is the number of bytes written so far, of which an earlier run wrote the first
    `resumed_bytes`. A run is resumed only if `identity` (source and settings, as texts) is equal to
    that of the earlier run. Then the part's bytes are compared with the journal's digests. Bytes
    that a power cut destroyed are detected and written again, so that nothing has to be flushed to
    the disk before the end.
    """

    def __init__(self, out: Path, layout: FileLayout, identity: dict[str, str]) -> None:
        self.out, self.layout = out, layout
        self.part_path = out.with_name(f".{out.name}.part")
        self.journal_path = out.with_name(f".{out.name}.journal")
        self.identity = {**identity, "header": hashlib.sha256(layout.header).hexdigest()}
        self.position, self.resumed_bytes, self.sha = 0, 0, hashlib.sha256()
        # Number of bytes for which a flush was started, and the latest flush.
        self.flushed_bytes, self.pending_flush = 0, Future[None]()
        self.pending_flush.set_result(None)
        self.recorded_at = 0.0

    @contextlib.contextmanager
    def open(self) -> Iterator["ResumableWriter"]:
        """Resume an interrupted run's part, or begin a new one. Only one process at a time may
        write a file.

        If the with block ends early, the part stays for a resume; but if the block raises
        DamagedSourceError, the part is deleted. Raises UserError if the file cannot be written.
        """
        _require_regular_files(self.part_path, self.journal_path)
        with _translate_errors(self.out), open_without_links(self.journal_path, "a+b") as journal:
            _lock(journal, self.out)
            self.log = journal
            self._resume()
            self.resumed_bytes = self.position
            self._check_disk_space()
            with (
                open_without_links(self.part_path, "r+b" if self.position else "wb") as data,
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
        """Append bytes to the file. From time to time, start to flush it to the disk in the
        background.
        """
        self.data.write(data)
        self.sha.update(data)
        self.position += memoryview(data).nbytes
        if self.position - self.flushed_bytes >= FLUSH_BYTES and self.pending_flush.done():
            self._start_flush()

    def pad(self, offset: int) -> None:
        """Append zeros until the file has `offset` bytes."""
        assert offset >= self.position, (offset, self.position)
        if offset > self.position:
            self.append(bytes(offset - self.position))

    def checkpoint(self, *, now: bool = True) -> None:
        """Write the position and the digest to the journal. With `now` false, do so only if the
        last line is at least JOURNAL_SECONDS old.
        """
        if now or time.monotonic() - self.recorded_at > JOURNAL_SECONDS:
            self.data.flush()
            self._write_line({"bytes": self.position, "sha256": self.sha.hexdigest()})
            self.recorded_at = time.monotonic()

    def finish(self) -> str:
        """Flush the file, check its header, rename it to its final name, and delete the journal.
        Return its SHA-256.
        """
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
        """Start to flush the written bytes to the disk in the background. Raises the error of the
        previous flush if that failed.
        """
        self.pending_flush.result()
        self.data.flush()
        self.flushed_bytes, self.pending_flush = (
            self.position,
            self.disk.submit(os.fsync, self.data.fileno()),
        )

    def _write_line(self, line: Mapping[str, str | int]) -> None:
        self.log.write(json.dumps(line).encode() + b"\n")
        self.log.flush()

    def _resume(self) -> None:
        """Compare the bytes of an earlier run with the journal, and set `position` after the last
        line that matches them. Cut off the journal's lines after that.
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
        """Raise UserError if the disk has too little space for the rest of the file."""
        try:
            require_disk_space(
                self.out.parent,
                max(0, self.layout.nbytes - reusable_bytes([self.part_path])),
                f"{self.out.name} needs",
                "or choose a path on another disk with -o",
            )
        except UserError:
            # If there is a part, the journal is kept, so that the earlier run can be resumed.
            if not self.part_path.exists():
                self.journal_path.unlink()
            raise


def _lines(journal: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the journal's complete lines, each with the byte at which it ends. A crash may have cut
    the last line.
    """
    journal.seek(0)
    end = 0
    while line := journal.readline(MAX_LINE_BYTES):
        try:
            value = parse_object(line, MAX_LINE_BYTES)
        except ValueError:
            return
        if not line.endswith(b"\n"):
            return
        end += len(line)
        yield end, value


def _matches_journal(data: BinaryIO, sha: "hashlib._Hash", line: Mapping[str, Any]) -> bool:
    """Return whether the file's bytes up to the position of a journal line have the line's digest.

    `data` is read from its current position up to the position of the line, and `sha` is updated
    with these bytes.
    """
    length = line.get("bytes")
    if type(length) is not int or length < data.tell():
        return False
    while block := data.read(min(length - data.tell(), BLOCK_BYTES)):
        sha.update(block)
    return data.tell() == length and sha.hexdigest() == line.get("sha256")


@contextlib.contextmanager
def _translate_errors(out: Path) -> Iterator[None]:
    """Convert errors of the file system to UserError. The part stays for a resume."""
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
    """Raise UserError if one of the files exists as a link, a folder or a device, which must not be
    written to.
    """
    for file in files:
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise UserError(
                f"{file} is not a regular file",
                hint="remove it, or choose another output path with -o",
            )


def _lock(journal: BinaryIO, out: Path) -> None:
    """Lock the journal. Raises UserError if another process has locked it."""
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
    # A journal without links was removed by another process, which finished the file before this
    # process got the lock.
    if not os.fstat(journal.fileno()).st_nlink:
        raise UserError(f"another process has just written {out}", hint="repeat the command")


def sync_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that a rename in it survives a power cut. Does nothing on
    systems that cannot flush folders.
    """
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
