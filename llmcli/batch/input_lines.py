"""Reads the input lines of a batch: JSONL from a file, a pipe or a gzip file, one line at a time.

The input is read twice. The first reading counts the lines and hashes the bytes, so that a later
run recognizes the same input. The second reading yields the lines.
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
from llmcli.text_input import expand_path, refuse_foreign_encoding

MAX_LINE_BYTES = 16 << 20  # a context of a million tokens is 4 MB of text
READ_BYTES = 1 << 20  # size of the pieces in which a longer line is skipped
GZIP_MAGIC, UTF8_BOM = b"\x1f\x8b", b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line of the input that is not blank.

    `index`: position among the non-blank lines, from 0. `number`: position among all lines of the
    file, from 1. `raw`: the bytes of the line without the newline. A line of more than
    MAX_LINE_BYTES has an empty `raw`, and `too_long` is its size in bytes; otherwise `too_long`
    is 0.
    """

    index: int
    number: int
    raw: bytes
    too_long: int = 0


@dataclass(frozen=True, slots=True)
class LineSurvey:
    """Facts about a complete input. `count`: number of lines that are not blank. `sha256`: hash of
    all bytes, in hex. `unended`: line number of the last line if it does not end with a newline
    (the file may be cut off), otherwise 0. `blank`: number of blank lines.
    """

    count: int
    sha256: str
    unended: int
    blank: int = 0


class BatchInput:
    """The lines of a seekable binary stream, which can be read several times. `name`: the name of
    the input in error messages. `path`: the text file, if there is one, for a hint.
    """

    def __init__(self, stream: BinaryIO, name: str, path: Path | None = None) -> None:
        self._stream, self.name, self._path = stream, name, path

    def survey(self) -> LineSurvey:
        """Read the complete input and return its line count and hash. Raises UserError if gzip data
        is damaged, or if the text is UTF-16 or UTF-32.
        """
        sha, count, unended, number = hashlib.sha256(), 0, 0, 0
        for number, raw, size in self._read(sha.update):
            count += bool(raw.strip()) or size > MAX_LINE_BYTES
            unended = 0 if raw.endswith(b"\n") else number
        return LineSurvey(count, sha.hexdigest(), unended, number - count)

    def lines(self) -> Iterator[InputLine]:
        """Yield the non-blank lines in order. Raises UserError if gzip data is damaged."""
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
        self, on_bytes: Callable[[bytes], object] = lambda chunk: None
    ) -> Iterator[tuple[int, bytes, int]]:
        """Yield the line number, the bytes and the size in bytes of every line, blank lines too. A
        byte-order mark at the start of the input is removed. For a line of more than MAX_LINE_BYTES
        the yielded bytes are only its last chunk.

        `on_bytes` is called with every chunk of bytes as it is read, for hashing.
        """
        self._stream.seek(0)
        number = 0
        try:
            while raw := self._stream.readline(MAX_LINE_BYTES):
                on_bytes(raw)
                number += 1
                if number == 1:
                    refuse_foreign_encoding(raw, self.name, path=self._path)
                size = len(raw)
                while not raw.endswith(b"\n") and (chunk := self._stream.readline(READ_BYTES)):
                    on_bytes(raw := chunk)
                    size += len(chunk)
                yield number, raw.removeprefix(UTF8_BOM if number == 1 else b""), size
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"{self.name} is damaged gzip: {error}",
                hint="compress it again; gzip -t checks it",
            ) from None


@contextmanager
def open_input(name: str, copy_folder: Path) -> Iterator[BatchInput]:
    """Open the file `name`, or standard input if `name` is `-`, and yield it as a BatchInput. Gzip
    is recognized by its first bytes. Because the input is read twice, a pipe is first copied to an
    unnamed temporary file in `copy_folder`.

    Raises UserError if the file cannot be opened.
    """
    with ExitStack() as stack:
        if name == "-":
            stream: BinaryIO = stack.enter_context(tempfile.TemporaryFile(dir=copy_folder))
            shutil.copyfileobj(sys.stdin.buffer, stream)
        else:
            try:
                stream = stack.enter_context(expand_path(name).open("rb"))
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
        path = None if name == "-" or is_gzip else expand_path(name)
        yield BatchInput(stream, "stdin" if name == "-" else name, path)
