"""A batch's answers on the disk: written as they are finished, put into the input's order at the
end.

`.OUT.journal` begins with what the batch is (input, model, settings) and then holds a line of OUT
for each that is finished, in the order of finishing, each with its index and a checksum. A killed
run goes on from it: what is in it is not computed again. When none is missing OUT is written beside
its place, flushed and renamed.

2026-11: all answers go to the disk at once instead of waiting in memory for those before them: a
line that takes a thousand tokens holds nothing back and costs a killed run nothing. The price is
writing everything twice.
"""

import fcntl
import json
import os
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from llmcli.catalog.partial import sync_folder
from llmcli.errors import UserError

FORM = "llmcli batch 1"
OFTEN = 2.0  # seconds after which what was written is flushed to the disk itself
NOWHERE = -1


class Journal:
    """One batch on its way to OUT; used within open(). `count` lines are expected, `finished` are
    there.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], count: int) -> None:
        self.out, self.count, self.finished = out, count, 0
        self.path, self.part = (
            out.with_name(f".{out.name}.journal"),
            out.with_name(f".{out.name}.part"),
        )
        self._head = {"form": FORM, **json.loads(json.dumps(identity))}
        self._places = array("q", [NOWHERE]) * count
        self._synced = time.monotonic()

    @contextmanager
    def open(self, *, force: bool = False) -> Iterator["Journal"]:
        """Take up what an interrupted run left, or begin. One process at a time.

        Raises UserError where what is there is of another input or other settings (`force` throws
        it away), where another process is at it, or where the disk does not let it be written.
        """
        for file in (self.path, self.part, self.out):
            if (file.is_symlink() and not file.exists()) or (file.exists() and not file.is_file()):
                raise UserError(f"{file} is no ordinary file", hint="choose another place with -o")
        with told(self.out), self.path.open("a+b", buffering=0) as stream:
            _lock(stream, self.path, self.out)
            self._stream = stream
            if force:
                stream.truncate(0)
            self._take_up()
            if not stream.seek(0, os.SEEK_END):
                stream.write(json.dumps(self._head).encode() + b"\n")
            try:
                yield self
            finally:
                self.sync()

    def has(self, index: int) -> bool:
        """Whether that line is finished."""
        return self._places[index] != NOWHERE

    def put(self, index: int, line: bytes) -> None:
        """A finished line of OUT, without its newline. It survives whatever kills the process."""
        assert not self.has(index) and b"\n" not in line, index
        body = b"%d %s" % (index, line)
        place = self._stream.tell()
        rest = memoryview(b"%08x %s\n" % (zlib.crc32(body), body))
        while rest:  # a full disk takes a part of it before it says so
            rest = rest[self._stream.write(rest) :]
        self._places[index] = place
        self.finished += 1
        if time.monotonic() - self._synced > OFTEN:
            self.sync()

    def sync(self) -> None:
        """Let it survive a power cut, too."""
        os.fsync(self._stream.fileno())
        self._synced = time.monotonic()

    def finish(self) -> None:
        """Write OUT in the input's order; the journal goes."""
        assert self.finished == self.count, (self.finished, self.count)
        with self.path.open("rb") as journal, self.part.open("wb") as part:
            for place in self._places:
                journal.seek(place)
                part.write(journal.readline().split(b" ", 2)[2])
            part.flush()
            os.fsync(part.fileno())
        self.part.replace(self.out)
        self.path.unlink()
        sync_folder(self.out.parent)

    def _take_up(self) -> None:
        """Read what is there, and cut it after the last line that is whole."""
        with self.path.open("rb") as stream:
            first = stream.readline()
            if not first.endswith(b"\n"):  # nothing, or cut short in its first line
                self._stream.truncate(0)
                return
            self._compare(first)
            end = stream.tell()
            while line := stream.readline():
                index = self._index(line)
                if index is None:
                    break
                if not self.has(index):
                    self._places[index] = end
                    self.finished += 1
                end = stream.tell()
        self._stream.truncate(end)

    def _index(self, line: bytes) -> int | None:
        """Which line of OUT a whole one of the journal holds; None for one that was cut short."""
        check, _, body = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or check != b"%08x" % zlib.crc32(body):
            return None
        index = int(body.partition(b" ")[0])
        return index if index < self.count else None

    def _compare(self, first: bytes) -> None:
        """Raise UserError unless the journal is of this batch."""
        try:
            there = json.loads(first)
        except (ValueError, RecursionError):
            there = None
        if not isinstance(there, dict) or there.get("form") != FORM:
            raise UserError(
                f"{self.path} is no journal of a batch",
                hint="remove it, or choose another name with -o",
            )
        if there == self._head:
            return
        words = [
            name
            for name in sorted({*there, *self._head})
            if there.get(name) != self._head.get(name)
        ]
        same = (
            f"-c {there.get('context')} goes on"
            if words == ["context"]
            else "the same settings go on"
        )
        raise UserError(
            f"{self.out} was begun otherwise: {'; '.join(self._difference(name, there) for name in words)}",
            hint=f"{same}; --force begins anew, -o another name keeps both",
        )

    def _difference(self, name: str, there: Mapping[str, Any]) -> str:
        before, now = there.get(name), self._head.get(name)
        if name == "input":
            return "another input"
        both = [json.dumps(value, ensure_ascii=False) for value in (before, now)]
        return name if max(map(len, both)) > 60 else f"{name} {both[0]} then, {both[1]} now"


@contextmanager
def told(out: Path) -> Iterator[None]:
    """Turn what the file system says into words; what is there stays, so that a later run can go
    on.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror or error}",
            hint="make room or check the folder, then give the same command: it goes on where it stopped",
        ) from None


def _lock(stream: BinaryIO, path: Path, out: Path) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(
            f"another process is writing {out}", hint="wait for it, or choose another name"
        ) from None
    if not os.fstat(
        stream.fileno()
    ).st_nlink:  # it was finished and removed before the lock was ours
        raise UserError(
            f"another process has just written {out}", hint="give the same command again"
        )
