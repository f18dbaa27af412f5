"""The journal of a batch: a file that receives each output line as soon as the line is finished.
At the end the lines are copied to the output file OUT in the order of the input.

The first line of the file `.OUT.journal` is the identity of the batch (input, model, settings).
Each further line is a record: a checksum, the index of the input line, and the output line. An
interrupted run resumes from the journal and does not compute finished lines again. When all lines
are finished, they are written to `.OUT.part`, which is flushed to the disk and renamed to OUT.

Output lines do not wait in memory for the lines before them, so that an interruption loses no
finished line. The price is that everything is written twice.
"""

import fcntl
import json
import os
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, overload

from llmcli.atomic_files import sync_folder
from llmcli.catalog.disk_space import require_free_space
from llmcli.errors import UserError
from quant.json_dataclasses import parse_object
from quant.link_safety import open_without_links

JOURNAL_FORM = "llmcli batch 1"
SYNC_SECONDS = 2.0  # seconds between two flushes to the disk
MAX_HEAD_BYTES = 1 << 24  # of the first line, which has the settings of all lines
MAX_RECORD_BYTES = 1 << 28  # of a record; its answer may list the log probability of every token
MAX_INDEX_DIGITS = 12
MIN_LINE_BYTES = 100  # no output line is shorter
NO_OFFSET = -1  # in place of a file offset, for a line that is not finished


class ForeignJournal(UserError):
    """The file of a journal belongs to another batch, or is none."""


class FinishedLines(Sequence[bytes]):
    """The lines of a complete journal in the order of the input, without newlines. They are read
    from the file when they are needed.
    """

    def __init__(self, stream: BinaryIO, offsets: Sequence[int]) -> None:
        self._stream, self._offsets = stream, offsets

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        self._stream.seek(self._offsets[index])
        return self._stream.readline().split(b" ", 2)[2].removesuffix(b"\n")


# Writes the output file from the finished lines to an open file.
OutputWriter = Callable[[Sequence[bytes], BinaryIO], None]


def write_lines(lines: Sequence[bytes], output: BinaryIO) -> None:
    """Write the lines to `output` in the order of the input."""
    for line in lines:
        output.write(line + b"\n")


class BatchJournal:
    """The journal of the batch that writes the output file `out`. All methods must be called inside
    `with journal.open():`.

    `identity`: JSON object that identifies the batch; `count`: number of lines of the batch;
    `permissions`: of a new journal, less those in the umask; `n_finished`: number of lines in the
    journal.
    """

    def __init__(
        self, out: Path, identity: Mapping[str, Any], count: int, permissions: int = 0o666
    ) -> None:
        self.out, self.count, self.n_finished = out, count, 0
        self._permissions = permissions
        self.path, self.unfinished_path = (
            out.with_name(f".{out.name}.journal"),
            out.with_name(f".{out.name}.part"),
        )
        self._head = {"form": JOURNAL_FORM, **json.loads(json.dumps(identity))}
        # By index of the line: where its record starts in the journal file.
        self._offsets = array("q", [NO_OFFSET]) * count
        self._synced_at = time.monotonic()

    @contextmanager
    def open(self, *, force: bool = False) -> Iterator["BatchJournal"]:
        """Open the journal of an interrupted run, or create a new one. `force` discards the earlier
        run's journal. The file is locked, so that only one process can write to it.

        Raises UserError if the journal belongs to a batch with another identity and `force` is not
        set, if another process has locked it, if the disk has no space even for the shortest lines,
        or if a file cannot be written.
        """
        for file in (self.path, self.unfinished_path, self.out):
            if (file.is_symlink() and not file.exists()) or (file.exists() and not file.is_file()):
                raise UserError(f"{file} is not a regular file", hint="choose another path with -o")
        with (
            explain_write_errors(self.out),
            open_without_links(
                self.path, "a+b", buffering=0, permissions=self._permissions
            ) as stream,
        ):
            _lock(stream, self.path, self.out)
            self._stream = stream
            if force:
                stream.truncate(0)
            self._read_existing()
            n_missing = 2 * self.count - self.n_finished  # lines of the journal and of OUT
            require_free_space(n_missing * MIN_LINE_BYTES, self.out.absolute().parent)
            if not stream.seek(0, os.SEEK_END):
                stream.write(json.dumps(self._head).encode() + b"\n")
            try:
                yield self
            finally:
                self.sync()

    def has(self, index: int) -> bool:
        """Return whether the line with this index is finished."""
        return self._offsets[index] != NO_OFFSET

    def append(self, index: int, line: bytes) -> None:
        """Append the output line (without newline) of the input line with this index. The line is
        passed to the operating system at once, so that it is not lost if this process crashes.
        """
        assert not self.has(index) and b"\n" not in line, index
        body = b"%d %s" % (index, line)
        offset = self._stream.tell()
        record = memoryview(b"%08x %s\n" % (zlib.crc32(body), body))
        while record:  # a write to a full disk may store a part of the record before it fails
            record = record[self._stream.write(record) :]
        self._offsets[index] = offset
        self.n_finished += 1
        if time.monotonic() - self._synced_at > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Flush the journal to the disk, so that it survives a power failure."""
        os.fsync(self._stream.fileno())
        self._synced_at = time.monotonic()

    def finish(
        self,
        write_output: OutputWriter = write_lines,
        on_renamed: Callable[[], None] = lambda: None,
    ) -> None:
        """Write all output lines to OUT in the order of the input, or as `write_output` does, and
        remove the journal. Every line of the batch must be finished. If the disk is full, the
        journal stays, and a part of OUT does not. `on_renamed` is called when OUT is complete.
        """
        assert self.n_finished == self.count, (self.n_finished, self.count)
        try:
            with (
                self.path.open("rb") as journal,
                open_without_links(self.unfinished_path, "wb") as output,
            ):
                write_output(FinishedLines(journal, self._offsets), output)
                output.flush()
                os.fsync(output.fileno())
        except OSError:
            self.unfinished_path.unlink(missing_ok=True)
            raise
        self.unfinished_path.replace(self.out)
        on_renamed()
        self.path.unlink()
        sync_folder(self.out.parent)

    def finished_lines(self) -> Iterator[bytes]:
        """Yield the output lines that are finished, with their newlines, in the order of the input."""
        with self.path.open("rb") as journal:
            for offset in self._offsets:
                if offset != NO_OFFSET:
                    journal.seek(offset)
                    yield journal.readline().split(b" ", 2)[2]

    def remove(self) -> None:
        """Remove the journal, whose lines were written elsewhere."""
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def _read_existing(self) -> None:
        """Read the records that an earlier run has written, and truncate the file after the last
        complete record. Raises UserError if the file is not the journal of this batch.
        """
        with self.path.open("rb") as stream:
            first = stream.readline(MAX_HEAD_BYTES)
            # the file is empty, or its first line is incomplete
            if not first.endswith(b"\n") and len(first) < MAX_HEAD_BYTES:
                self._stream.truncate(0)
                return
            self._check_identity(first)
            end = stream.tell()
            while line := stream.readline(MAX_RECORD_BYTES):
                index = self._index(line)
                if index is None:
                    break
                if not self.has(index):
                    self._offsets[index] = end
                    self.n_finished += 1
                end = stream.tell()
        self._stream.truncate(end)

    def _index(self, line: bytes) -> int | None:
        """Return the index of the input line that a record belongs to. Return None if the record is
        incomplete or its checksum does not match.
        """
        check, _, body = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or check != b"%08x" % zlib.crc32(body):
            return None
        digits = body.partition(b" ")[0]
        if not (digits.isdigit() and len(digits) <= MAX_INDEX_DIGITS):
            return None
        index = int(digits)
        return index if index < self.count else None

    def _check_identity(self, first_line: bytes) -> None:
        """Raise UserError if the first line of the journal file is not the identity of this batch.
        The message names the settings that differ.
        """
        try:
            stored = parse_object(first_line, MAX_HEAD_BYTES)
        except ValueError:
            stored = {}
        if stored.get("form") != JOURNAL_FORM:
            raise ForeignJournal(
                f"{self.path} is not the journal of a batch",
                hint="remove it, or choose another name with -o",
            )
        if stored == self._head:
            return
        names = [
            name
            for name in sorted({*stored, *self._head})
            if stored.get(name) != self._head.get(name)
        ]
        resume = (
            f"-c {stored.get('context')} resumes it"
            if names == ["context"]
            else "the same settings resume it"
        )
        differences = "; ".join(self._difference(name, stored) for name in names)
        raise ForeignJournal(
            f"{self.out} was started with other settings: {differences}",
            hint=f"{resume}; --force starts again, another name with -o keeps both",
        )

    def _difference(self, name: str, stored: Mapping[str, Any]) -> str:
        """Return a text that compares one setting of the identity `stored` with this run's value.
        Long values are left out.
        """
        before, now = stored.get(name), self._head.get(name)
        if name == "input":
            return "another input"
        values = [json.dumps(value, ensure_ascii=False) for value in (before, now)]
        return name if max(map(len, values)) > 60 else f"{name} {values[0]} then, {values[1]} now"


@contextmanager
def explain_write_errors(out: Path) -> Iterator[None]:
    """Convert an OSError in the with block to a UserError that says how to resume. No file is
    removed.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror or error}",
            hint="free some space or check the folder, then run the same command: it resumes",
        ) from None


def _lock(stream: BinaryIO, path: Path, out: Path) -> None:
    """Lock the open journal file against other processes. Raises UserError if another process has
    locked it, or has just finished the batch and removed the file.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(
            f"another process is writing {out}", hint="wait for it, or choose another name with -o"
        ) from None
    # The file has no name any more if another process removed it between this open and the lock.
    if not os.fstat(stream.fileno()).st_nlink:
        raise UserError(
            f"another process has just written {out}", hint="run the same command again"
        )
