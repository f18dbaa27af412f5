"""A file that grows by whole records and can be gone on with after any kill: a JSON head in its
first line, then for each record its number, the length and checksum of its bytes, and the bytes.

What was cut off at the end, or does not fit its checksum, counts as never written.
"""

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

MAGIC = "llmcli records 1"
RECORD = struct.Struct("<IQI")  # number, bytes, their CRC-32
LONGEST_HEAD = 1 << 16


class Records:
    """One open file. `head` is its first line, `numbers` are the records that are there."""

    def __init__(self, stream: BinaryIO, head: dict[str, Any]) -> None:
        self._stream, self.head = stream, head
        self._places: dict[int, tuple[int, int]] = {}

    @property
    def numbers(self) -> set[int]:
        return set(self._places)

    @classmethod
    def begin(cls, path: Path, head: dict[str, Any]) -> Self:
        """A new file, in place of any that is there."""
        stream = path.open("w+b")
        stream.write(json.dumps({"format": MAGIC, **head}).encode() + b"\n")
        _sync(stream)
        return cls(stream, head)

    @classmethod
    def resume(cls, path: Path, *, write: bool = True) -> Self | None:
        """The file as far as it is whole, cut there if it is to be written; None where there is
        none of this form.
        """
        try:
            stream = path.open("r+b" if write else "rb")
        except OSError:
            return None
        found = cls._read(stream)
        if found is None:
            stream.close()
        elif write:
            stream.truncate(stream.tell())
        return found

    @classmethod
    def _read(cls, stream: BinaryIO) -> Self | None:
        line = stream.readline(LONGEST_HEAD)
        try:
            head = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            head = None
        if not isinstance(head, dict) or head.pop("format", None) != MAGIC:
            return None
        found, size = cls(stream, head), os.fstat(stream.fileno()).st_size
        while True:
            at = stream.tell()
            raw = stream.read(RECORD.size)
            if len(raw) == RECORD.size:
                number, nbytes, check = RECORD.unpack(raw)
                if nbytes <= size - at - RECORD.size and zlib.crc32(stream.read(nbytes)) == check:
                    found._places[number] = (at + RECORD.size, nbytes)
                    continue
            stream.seek(at)
            return found

    def get(self, number: int) -> bytes:
        """The bytes of one record."""
        at, nbytes = self._places[number]
        end = self._stream.tell()
        self._stream.seek(at)
        raw = self._stream.read(nbytes)
        self._stream.seek(end)
        return raw

    def put(self, records: Mapping[int, bytes | memoryview]) -> None:
        """Add records and let the disk have them."""
        for number, raw in records.items():
            self._stream.write(RECORD.pack(number, len(raw), zlib.crc32(raw)))
            self._places[number] = (self._stream.tell(), len(raw))
            self._stream.write(raw)
        _sync(self._stream)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
