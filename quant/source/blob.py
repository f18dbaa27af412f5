"""Stored bytes that are read by offset, from a local file or from a server.

Readers of a checkpoint request bytes from a Blob and need not know where they are stored.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quant.errors import DamagedSourceError, UserError

if TYPE_CHECKING:
    from quant.native.ggml import U8

# bytes of a sample, and number of samples that identify a checkpoint
SAMPLE_BYTES, SAMPLE_COUNT = 4096, 64


class Blob(Protocol):
    """`size` bytes of which any part can be read, from several threads at once.

    `path` names them in messages.
    """

    @property
    def path(self) -> Path: ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, nbytes: int) -> "U8":
        """Return exactly `nbytes` bytes from `offset`. Raises UserError if they cannot be read."""
        ...


@dataclass(frozen=True)
class LocalFile:
    """A file on this disk.

    It is read, not mapped: if the file shrinks meanwhile, reading raises UserError instead of
    killing the process.
    """

    path: Path

    @cached_property
    def size(self) -> int:
        """Return the file's size in bytes at the first call."""
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


def make_row_reader(blob: Blob, offset: int, width: int) -> "Callable[[int, int], U8]":
    """Return a function that reads rows of `width` bytes, which are stored one after another from
    `offset` on.

    Shapes: `read(first, last)` gives `[last - first, width]`.
    """

    def read(first: int, last: int) -> "U8":
        return blob.read(offset + first * width, (last - first) * width).reshape(
            last - first, width
        )

    return read


def read_samples(blobs: Sequence[Blob]) -> "list[U8]":
    """Return small samples that are spread evenly over the bytes of all `blobs`, from the first
    byte to the last.

    The samples of the same bytes are the same wherever they are stored, and they are few enough to
    fetch them one by one from a server.
    """
    total = sum(blob.size for blob in blobs)
    steps = (
        [step * (total - 1) // (SAMPLE_COUNT - 1) for step in range(SAMPLE_COUNT)] if total else []
    )
    positions = dict.fromkeys(_sample_around(blobs, at) for at in steps)
    with ThreadPoolExecutor(8, thread_name_prefix="sample") as pool:
        return list(pool.map(lambda place: blobs[place[0]].read(*place[1:]), positions))


def _sample_around(blobs: Sequence[Blob], at: int) -> tuple[int, int, int]:
    """Return the sample around byte `at` of all blobs joined, as (index of the blob, offset,
    length).
    """
    for number, blob in enumerate(blobs):
        if at < blob.size:
            return number, max(0, min(at, blob.size - SAMPLE_BYTES)), min(SAMPLE_BYTES, blob.size)
        at -= blob.size
    raise AssertionError(at)
