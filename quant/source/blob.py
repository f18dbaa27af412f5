"""Stored bytes by offset, in a local file or on a server.

Readers of a checkpoint ask a Blob for bytes and do not see where they are stored.
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

SAMPLE_BYTES, SAMPLE_COUNT = 4096, 64  # bytes of a sample; samples that identify a checkpoint


class Blob(Protocol):
    """`size` bytes that can be read at any offset, from several threads at once.

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
    """Return a reader of rows of `width` bytes, stored one after another from `offset`.

    Shapes: `read(first, last)` gives `[last - first, width]`.
    """

    def read(first: int, last: int) -> "U8":
        return blob.read(offset + first * width, (last - first) * width).reshape(
            last - first, width
        )

    return read


def read_samples(blobs: Sequence[Blob]) -> "list[U8]":
    """Return small pieces spread evenly over `blobs`, from the first byte to the last.

    The same bytes give the same pieces wherever they are stored, and the pieces are few enough to
    fetch one by one from a server.
    """
    total = sum(blob.size for blob in blobs)
    steps = (
        [step * (total - 1) // (SAMPLE_COUNT - 1) for step in range(SAMPLE_COUNT)] if total else []
    )
    positions = dict.fromkeys(_sample_around(blobs, at) for at in steps)
    with ThreadPoolExecutor(8, thread_name_prefix="sample") as pool:
        return list(pool.map(lambda place: blobs[place[0]].read(*place[1:]), positions))


def _sample_around(blobs: Sequence[Blob], at: int) -> tuple[int, int, int]:
    """Return the sample around byte `at` of all blobs joined: index of the blob, offset, length."""
    for number, blob in enumerate(blobs):
        if at < blob.size:
            return number, max(0, min(at, blob.size - SAMPLE_BYTES)), min(SAMPLE_BYTES, blob.size)
        at -= blob.size
    raise AssertionError(at)
