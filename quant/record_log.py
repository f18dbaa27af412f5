"""An append-only file of checksummed records, which stays readable if the process is killed at any
moment.

The first line is a JSON object, called the head. A record consists of a number chosen by the
caller, the length of its data in bytes, the CRC-32 of the data, and the data. Reading stops at the
first record that is cut off or fails its checksum.
"""

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from quant.json_dataclasses import parse_object
from quant.link_safety import open_without_links

MAGIC = "llmcli records 1"
RECORD_HEADER = struct.Struct("<IQI")  # number, length in bytes, CRC-32
MAX_HEAD_BYTES = 1 << 16


class RecordLog:
    """One open record file.

    `head` is the JSON object of the first line. `numbers` are the numbers of all intact records.
    """

    def __init__(self, path: Path, stream: BinaryIO, head: dict[str, Any]) -> None:
        self.path, self._stream, self.head = path, stream, head
        self._spans: dict[int, tuple[int, int]] = {}

    @property
    def numbers(self) -> set[int]:
        return set(self._spans)

    @property
    def sizes(self) -> set[int]:
        """The sizes in bytes of all intact records."""
        return {nbytes for _, nbytes in self._spans.values()}

    @classmethod
    def create(cls, path: Path, head: dict[str, Any]) -> Self:
        """Create a file whose first line is `head`, replacing any existing file."""
        stream = open_without_links(path, "w+b")
        stream.write(json.dumps({"format": MAGIC, **head}).encode() + b"\n")
        _sync(stream)
        return cls(path, stream, head)

    @classmethod
    def resume(cls, path: Path, *, write: bool = True) -> Self | None:
        """Open an existing file. Return None if the file is missing or is not a record file.

        With `write`, the file is opened for appending, and everything after the last intact record
        is cut off. Otherwise it is opened read-only and stays unchanged.
        """
        try:
            stream = open_without_links(path, "r+b") if write else path.open("rb")
        except OSError:
            return None
        records = cls._read(path, stream)
        if records is None:
            stream.close()
        elif write:
            stream.truncate(stream.tell())
        return records

    @classmethod
    def _read(cls, path: Path, stream: BinaryIO) -> Self | None:
        line = stream.readline(MAX_HEAD_BYTES)
        try:
            head = parse_object(line, MAX_HEAD_BYTES) if line.endswith(b"\n") else {}
        except ValueError:
            return None
        if head.pop("format", None) != MAGIC:
            return None
        records, size = cls(path, stream, head), os.fstat(stream.fileno()).st_size
        while True:
            start = stream.tell()
            raw = stream.read(RECORD_HEADER.size)
            if len(raw) == RECORD_HEADER.size:
                number, nbytes, checksum = RECORD_HEADER.unpack(raw)
                if (
                    nbytes <= size - start - RECORD_HEADER.size
                    and zlib.crc32(stream.read(nbytes)) == checksum
                ):
                    records._spans[number] = (start + RECORD_HEADER.size, nbytes)
                    continue
            stream.seek(start)
            return records

    def read(self, number: int) -> bytes:
        """Return the data of the record with this number. Raises KeyError for an unknown number."""
        offset, nbytes = self._spans[number]
        end = self._stream.tell()
        self._stream.seek(offset)
        raw = self._stream.read(nbytes)
        self._stream.seek(end)
        return raw

    def append(self, records: Mapping[int, bytes | memoryview]) -> None:
        """Append records, given as data by record number, and flush them to the disk."""
        for number, raw in records.items():
            self._stream.write(RECORD_HEADER.pack(number, len(raw), zlib.crc32(raw)))
            self._spans[number] = (self._stream.tell(), len(raw))
            self._stream.write(raw)
        _sync(self._stream)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
