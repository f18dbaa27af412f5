"""The input lines of a batch: JSONL from a file, a pipe or gzip. The input is read twice, but is
never completely in memory.

The first reading counts the lines and hashes the bytes, so that a later run recognizes the same
input. The second reading yields the lines.
"""

import gzip
import hashlib
import io
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llmcli.errors import UserError

MAX_LINE_BYTES = 16 << 20  # a context of a million tokens is 4 MB of text
READ_BYTES = 1 << 20
GZIP_MAGIC, UTF8_BOM = b"\x1f\x8b", b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line that is not blank. `index`: its number among the lines that are not blank, from 0;
    `number`: its number among all lines, from 1. `raw`: its bytes without the newline, empty if the
    line is too long; `too_long`: the size in bytes of a line that is too long, otherwise 0.
    """

    index: int
    number: int
    raw: bytes
    too_long: int = 0


@dataclass(frozen=True, slots=True)
class LineSurvey:
    """The result of the first reading. `count`: number of lines that are not blank; `sha256`: hash
    of all bytes; `unended`: number of the last line if it has no newline at its end, otherwise 0.
    """

    count: int
    sha256: str
    unended: int


class BatchInput:
    """An input that can be read several times. `name`: the input's name in messages."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream, self.name = stream, name

    def survey(self) -> LineSurvey:
        """Read the complete input once and return the survey."""
        sha, count, unended = hashlib.sha256(), 0, 0
        for number, raw, size in self._read(sha.update):
            count += bool(raw.strip()) or size > MAX_LINE_BYTES
            unended = 0 if raw.endswith(b"\n") else number
        return LineSurvey(count, sha.hexdigest(), unended)

    def lines(self) -> Iterator[InputLine]:
        """Yield the lines that are not blank, in order."""
        index = 0
        for number, raw, size in self._read():
            if size > MAX_LINE_BYTES or raw.strip():
                yield (
                    InputLine(index, number, b"", size)
                    if size > MAX_LINE_BYTES
                    else InputLine(index, number, raw.strip())
                )
                index += 1

    def _read(
        self, see: Callable[[bytes], object] = lambda piece: None
    ) -> Iterator[tuple[int, bytes, int]]:
        """Yield the number, the bytes (without a byte-order mark) and the size of every line. The
        bytes of a line that is too long are only its last piece. `see`: function that is called
        with all bytes in pieces.
        """
        self._stream.seek(0)
        number = 0
        try:
            while raw := self._stream.readline(MAX_LINE_BYTES):
                see(raw)
                number += 1
                size = len(raw)
                while not raw.endswith(b"\n") and (more := self._stream.readline(READ_BYTES)):
                    see(raw := more)
                    size += len(more)
                yield number, raw.removeprefix(UTF8_BOM if number == 1 else b""), size
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"{self.name} is damaged gzip: {error}",
                hint="compress it again; gzip -t checks it",
            ) from None


@contextmanager
def open_input(name: str, copy_folder: Path) -> Iterator[BatchInput]:
    """Open the input called `name`; `-` is standard input. The data of a pipe is first copied into
    an unnamed file in `copy_folder`.

    Raises UserError if the input cannot be read.
    """
    with ExitStack() as stack:
        if name == "-":
            stream: BinaryIO = stack.enter_context(tempfile.TemporaryFile(dir=copy_folder))
            shutil.copyfileobj(sys.stdin.buffer, stream)
        else:
            try:
                stream = stack.enter_context(Path(name).expanduser().open("rb"))
            except OSError as error:
                raise UserError(
                    f"cannot read {name}: {error.strerror}", hint="check the name"
                ) from None
            if not stream.seekable():
                pipe = stream
                stream = stack.enter_context(tempfile.TemporaryFile(dir=copy_folder))
                shutil.copyfileobj(pipe, stream)
        stream.seek(0)
        is_gzip = stream.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        stream.seek(0)
        if is_gzip:
            stream = stack.enter_context(io.BufferedReader(gzip.GzipFile(fileobj=stream)))
        yield BatchInput(stream, "stdin" if name == "-" else name)
