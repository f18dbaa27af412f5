"""Where stored bytes lie: a file here, or one that a server gives parts of.

Readers of a checkpoint ask a Blob for bytes by their place and never see where they come from. It
knows bytes, neither formats nor networks.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quant.errors import Damaged, Refusal

if TYPE_CHECKING:
    from quant.native import U8

SAMPLE, SAMPLES = 4096, 64  # bytes of a sample, and how many tell one checkpoint from another


class Blob(Protocol):
    """`size` bytes that can be read anywhere, from several threads at once; `path` names them in
    what is said.
    """

    @property
    def path(self) -> Path: ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, nbytes: int) -> "U8":
        """Exactly `nbytes` from `offset` on; raises Refusal where they cannot be had."""
        ...


@dataclass(frozen=True)
class LocalFile:
    """A file on this disk. It is read, not mapped: one that shrinks meanwhile is a Refusal, not a
    dead process.
    """

    path: Path

    @cached_property
    def size(self) -> int:
        """Its bytes when it was first asked."""
        return self.path.stat().st_size

    def read(self, offset: int, nbytes: int) -> "U8":
        """As the protocol says."""
        import numpy as np

        try:
            data = np.fromfile(self.path, np.uint8, nbytes, offset=offset)
        except OSError as error:
            raise Refusal(
                f"{self.path} cannot be read: {error.strerror or error}", hint="check the file"
            ) from None
        if data.size != nbytes:
            raise Damaged(
                f"{self.path} ends within the bytes that are read", hint="fetch the file again"
            )
        return data


def rows_of(blob: Blob, offset: int, width: int) -> "Callable[[int, int], U8]":
    """A reader of rows of `width` bytes that stand one after another from `offset` on."""

    def read(first: int, last: int) -> "U8":
        return blob.read(offset + first * width, (last - first) * width).reshape(
            last - first, width
        )

    return read


def samples(blobs: Sequence[Blob]) -> "list[U8]":
    """Small pieces from all over `blobs`: the same for the same bytes, wherever those lie.

    Evenly spread from the first byte to the last, few enough to be fetched one by one from a
    server.
    """
    total = sum(blob.size for blob in blobs)
    steps = [step * (total - 1) // (SAMPLES - 1) for step in range(SAMPLES)] if total else []
    places = dict.fromkeys(_place(blobs, at) for at in steps)
    with ThreadPoolExecutor(8, thread_name_prefix="sample") as pool:
        return list(pool.map(lambda place: blobs[place[0]].read(*place[1:]), places))


def _place(blobs: Sequence[Blob], at: int) -> tuple[int, int, int]:
    """The sample around byte `at` of all blobs one after another: number of the blob, offset,
    length.
    """
    for number, blob in enumerate(blobs):
        if at < blob.size:
            return number, max(0, min(at, blob.size - SAMPLE)), min(SAMPLE, blob.size)
        at -= blob.size
    raise AssertionError(at)
