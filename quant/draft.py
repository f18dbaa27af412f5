"""The file that is being written, beside its final place, and the journal that a killed run goes on
from.

Bytes are appended in the order of the file, so one running sha256 serves twice: the journal notes
how far the file had come and what the digest was there, and at the end it is the whole file's. It
knows bytes and places, no models.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from quant.errors import Damaged, Refusal
from quant.header import parse
from quant.writer import Layout, Slot

BLOCK = 1 << 20  # bytes read at a time when what is there is checked
OFTEN = 2.0  # seconds after which progress is noted within a slab too
FLUSHED = (
    1 << 25
)  # bytes written after which they are sent to the disk, beside the making of those behind them


class Draft:
    """`.OUT.part`, and `.OUT.journal` beside it; `position` is how far the file has come,
    `resumed` how far an earlier run had brought it.

    A journal line says: the first so many bytes had this sha256. On resuming the bytes are held
    against it, so nothing has to be flushed before the end: what a power cut took is found, and
    made again from there.
    """

    def __init__(self, out: Path, plan: Layout, identity: dict[str, str]) -> None:
        self.out, self.plan = out, plan
        self.part = out.with_name(f".{out.name}.part")
        self.journal = out.with_name(f".{out.name}.journal")
        self.identity = {**identity, "header": hashlib.sha256(plan.header).hexdigest()}
        self.position, self.resumed, self.sha = 0, 0, hashlib.sha256()
        self.sent, self.sending = 0, Future[None]()  # to the disk: how far, and the last time of it
        self.sending.set_result(None)
        self.noted = 0.0

    @contextlib.contextmanager
    def open(self) -> Iterator["Draft"]:
        """Take up what an interrupted run left, or begin; one process at a time.

        Whatever ends it early leaves the part to be gone on with, unless the source itself is
        Damaged.
        """
        _ordinary(self.part, self.journal)
        with _told(self.out), self.journal.open("a+b") as journal:
            _lock(journal, self.out)
            self.log = journal
            self._resume()
            self.resumed = self.position
            self._room()
            with (
                self.part.open("r+b" if self.position else "wb") as data,
                ThreadPoolExecutor(1, "flush") as disk,
            ):
                self.data, self.disk = data, disk
                data.seek(self.position)
                if not self.position:
                    journal.truncate(0)
                    self._line(dict(self.identity))
                    data.truncate(self.plan.nbytes)
                    self.append(self.plan.header)
                try:
                    yield self
                except Damaged:
                    self.part.unlink()
                    self.journal.unlink()
                    raise

    def append(self, data: bytes | memoryview) -> None:
        """The next bytes of the file."""
        self.data.write(data)
        self.sha.update(data)
        self.position += memoryview(data).nbytes
        if self.position - self.sent >= FLUSHED and self.sending.done():
            self._send()

    def pad(self, offset: int) -> None:
        """Zeros up to `offset`."""
        assert offset >= self.position, (offset, self.position)
        if offset > self.position:
            self.append(bytes(offset - self.position))

    def note(self, *, now: bool = True) -> None:
        """Tell the journal how far the file has come; without `now`, only if the last time is a
        while ago.
        """
        if now or time.monotonic() - self.noted > OFTEN:
            self.data.flush()
            self._line({"bytes": self.position, "sha256": self.sha.hexdigest()})
            self.noted = time.monotonic()

    def finish(self) -> str:
        """Flush, read the header back and compare it, put the file in its place; returns its
        sha256.
        """
        self.pad(self.plan.nbytes)
        self._send()
        written = parse(self.part)
        found = [Slot(t.name, t.shape, t.type, t.offset, t.nbytes) for t in written.tensors]
        assert tuple(found) == self.plan.slots, (
            "the file read back is not the file that was planned"
        )
        self.sending.result()
        self.part.replace(self.out)
        self.journal.unlink()
        sync_folder(self.out.parent)
        return self.sha.hexdigest()

    def _send(self) -> None:
        """Begin to put on the disk what has been written; what the last time met is raised here."""
        self.sending.result()
        self.data.flush()
        self.sent, self.sending = self.position, self.disk.submit(os.fsync, self.data.fileno())

    def _line(self, line: Mapping[str, str | int]) -> None:
        self.log.write(json.dumps(line).encode() + b"\n")
        self.log.flush()

    def _resume(self) -> None:
        """Read what is there, and go on after the last note that it bears out."""
        lines = _lines(self.log)
        end, first = next(lines, (0, None))
        if first != self.identity or not self.part.is_file():
            return
        with self.part.open("rb") as data:
            if data.seek(0, 2) != self.plan.nbytes:
                return
            data.seek(0)
            if data.read(len(self.plan.header)) != self.plan.header:
                return
            sha = hashlib.sha256(self.plan.header)
            for after, line in lines:
                if not _reached(data, sha, line) or not self.plan.whole_rows(data.tell()):
                    break
                end, self.position, self.sha = after, data.tell(), sha.copy()
        self.log.truncate(end)

    def _room(self) -> None:
        """Refuse before the first byte where the disk is too small."""
        have = shutil.disk_usage(self.out.parent).free
        # What an earlier run left is gone on with or overwritten: its blocks count as free.
        there = self.part.exists() and hasattr(os, "posix_fallocate")
        held = self.part.stat().st_blocks * 512 if there else 0
        need = max(0, self.plan.nbytes - held)
        if need > have:
            if (
                not self.part.exists()
            ):  # a journal that was there belongs to a run that may still be gone on with
                self.journal.unlink()
            raise Refusal(
                f"{self.out.parent} has {have:,} bytes free, {self.out.name} needs {need:,}",
                hint=f"free {need - have:,} bytes, or choose a place on another disk with -o",
            )


def _lines(journal: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """The journal's whole lines, each with the place where it ends; a crash may have cut the last
    one short.
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


def _reached(data: BinaryIO, sha: "hashlib._Hash", line: Mapping[str, Any]) -> bool:
    """Read on to where a note was made; whether the file is there what it was then."""
    there = line.get("bytes")
    if type(there) is not int or there < data.tell():
        return False
    while block := data.read(min(there - data.tell(), BLOCK)):
        sha.update(block)
    return data.tell() == there and sha.hexdigest() == line.get("sha256")


@contextlib.contextmanager
def _told(out: Path) -> Iterator[None]:
    """Turn what the file system says into words; the part stays, so that a later run can go on."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise Refusal(
                f"the disk is full: {out.name} could not be finished",
                hint="free some space and give the same command: it goes on where it stopped",
            ) from None
        raise Refusal(
            f"{out} cannot be written: {error.strerror or error}",
            hint="choose another place with -o",
        ) from None


def _ordinary(*files: Path) -> None:
    """Refuse to write through a link or into a device that stands where the part or its journal
    goes.
    """
    for file in files:
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise Refusal(
                f"{file} is no ordinary file", hint="remove it, or choose another place with -o"
            )


def _lock(journal: BinaryIO, out: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two writers of one file are the user's affair there
        return
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise Refusal(
            f"another process is writing {out}", hint="wait for it, or choose another name with -o"
        ) from None
    if not os.fstat(
        journal.fileno()
    ).st_nlink:  # it was finished, and its journal removed, before the lock was ours
        raise Refusal(f"another process has just written {out}", hint="give the same command again")


def sync_folder(folder: Path) -> None:
    """Make the rename itself last through a power cut, where folders can be flushed."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
