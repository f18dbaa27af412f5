"""Byte strings that are read by offset, from a local file or from a server.

Readers of a checkpoint request bytes from a Blob and need not know where they are stored.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quant.errors import DamagedSourceError, UserError

if TYPE_CHECKING:
    from quant.native.ggml import U8

# Bytes of a sample, and number of samples that identify a checkpoint.
SAMPLE_BYTES, SAMPLE_COUNT = 4096, 64


class Blob(Protocol):
    """A byte string of `size` bytes, any part of which can be read. Several threads may read at
    once.

    `path` names it in messages.
    """

    @property
    def path(self) -> Path: ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, nbytes: int) -> "U8":
        """Return exactly `nbytes` bytes from `offset`. Raises UserError if they cannot be read."""
        ...

    def finish_check(self, was_resumed: bool) -> None:
        """Check what was read, after the last read and before a file made from it gets its name.
        `was_resumed`: whether an earlier run has read some of the bytes. Raises DamagedSourceError
        if bytes were wrong.
        """
        ...


@dataclass(frozen=True)
class LocalFile:
    """A file on a local disk.

    It is read, not mapped: if the file shrinks meanwhile, reading raises UserError instead of
    killing the process.
    """

    path: Path

    @cached_property
    def size(self) -> int:
        """The file's size in bytes when it is first requested."""
        return self.path.stat().st_size

    def read(self, offset: int, nbytes: int) -> "U8":
        """Return exactly `nbytes` bytes from `offset`. Raises UserError if they cannot be read."""
        import numpy as np

        try:
            data = np.fromfile(self.path, np.uint8, nbytes, offset=offset)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read: {error.strerror or error}", hint="check the file"
            ) from None
        if data.size != nbytes:
            raise DamagedSourceError(
                f"{self.path} ends before the bytes to read", hint="fetch the file again"
            )
        return data

    def finish_check(self, was_resumed: bool) -> None:
        """Do nothing: the file is what the user has named."""


def make_row_reader(blob: Blob, offset: int, width: int) -> "Callable[[int, int], U8]":
    """Return a function that reads rows of `width` bytes, which are stored one after another from
    `offset` on.

    The function is read(first, last), which returns rows first .. last as bytes [last - first,
    width].
    """

    def read(first: int, last: int) -> "U8":
        return blob.read(offset + first * width, (last - first) * width).reshape(
            last - first, width
        )

    return read


def read_row_samples(read: "Callable[[int, int], U8]", rows: int, row_bytes: int) -> "Iterator[U8]":
    """Yield rows from the beginning, the middle and the end of a tensor, about SAMPLE_BYTES of each.
    `read(first, last)` returns the rows first .. last.
    """
    step = max(1, SAMPLE_BYTES // row_bytes)
    for first in {0, rows // 2, max(0, rows - step)}:
        yield read(first, min(first + step, rows))


def read_samples(blobs: Sequence[Blob]) -> "list[U8]":
    """Return SAMPLE_COUNT small samples that are spread evenly over the bytes of all `blobs`, from
    the first byte to the last. They identify a checkpoint.

    The samples do not depend on where the bytes are stored, and there are few enough of them to be
    fetched one by one from a server.
    """
    total = sum(blob.size for blob in blobs)
    positions = (
        [step * (total - 1) // (SAMPLE_COUNT - 1) for step in range(SAMPLE_COUNT)] if total else []
    )
    samples = dict.fromkeys(_sample_around(blobs, position) for position in positions)
    if all(isinstance(blob, LocalFile) for blob in blobs):  # threads would cost more than they save
        return [blobs[index].read(offset, nbytes) for index, offset, nbytes in samples]
    with ThreadPoolExecutor(8, thread_name_prefix="sample") as pool:
        return list(pool.map(lambda sample: blobs[sample[0]].read(*sample[1:]), samples))


def _sample_around(blobs: Sequence[Blob], position: int) -> tuple[int, int, int]:
    """Return the place of the sample around byte `position` of all blobs joined, as (index of the
    blob, offset, length).
    """
    for number, blob in enumerate(blobs):
        if position < blob.size:
            return (
                number,
                max(0, min(position, blob.size - SAMPLE_BYTES)),
                min(SAMPLE_BYTES, blob.size),
            )
        position -= blob.size
    raise AssertionError(position)
