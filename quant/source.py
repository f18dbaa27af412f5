"""What can be turned into a GGUF file, whatever it is stored as: entries of metadata, and weights
by rows.

A Source promises that its weights can be read in pieces, so that memory stays bounded. Both roads
end here: quantize.open_gguf() and convert.open_folder().
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from quant import native
from quant.blob import Blob, samples
from quant.errors import Damaged, Refusal
from quant.recipe import Facts

if TYPE_CHECKING:
    from quant.native import U8

SAMPLE = 4096  # bytes of each of three places of a tensor that go into the fingerprint


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor: `shape` in ggml's order, `read(first, last)` stored rows -> bytes [rows,
    row_bytes].

    Writing calls `read` from one thread only, ahead of need: tensors in the order of the source,
    rows ascending, each row once, some 16 million values at a time (pipeline.SLAB), from the first
    missing row on after a resume. It may take its time, and tries again by itself; others still use
    what it gave, so that must not change later. A Refusal stops the run and leaves what is written
    to be gone on with, a Damaged throws that away too. `stored` is the type it lies in, where
    reading makes another of it.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    read: "Callable[[int, int], U8]" = field(repr=False)
    stored: str = ""

    @property
    def columns(self) -> int:
        """Values in a row."""
        return self.shape[0]

    @property
    def rows(self) -> int:
        """Number of rows, experts' rows one after another."""
        rows = 1
        for size in self.shape[1:]:
            rows *= size
        return rows

    @property
    def elements(self) -> int:
        """Number of values."""
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes in its present type."""
        return self.rows * native.row_bytes(self.type, self.columns)


@dataclass(frozen=True)
class Source:
    """A model to write: `entries` are (key, stored type and value), in the order they will have."""

    path: Path
    files: tuple[Path, ...]
    name: str
    facts: Facts
    entries: tuple[tuple[str, bytes], ...]
    weights: tuple[Weight, ...]
    alignment: int
    notes: tuple[str, ...] = ()  # what the reader should be told about this source
    warnings: tuple[str, ...] = ()  # and what will go wrong with the file
    dtype: str = "F32"  # what its floats are stored as, mostly
    blobs: tuple[
        Blob, ...
    ] = ()  # where the weights are stored, if few reads must tell one source from another
    origin: "Source | None" = None  # what it was made of by exact rescaling (quant/folds)
    transform: str = ""  # the digest of folds that its files were made under
    fold: str = ""  # the digest of what made it of its origin
    folded: str = ""  # and how it was chosen

    @cached_property
    def fingerprint(self) -> str:
        """Tells sources apart: metadata, shapes, types and samples of the stored bytes; that of
        `origin` if it has one.

        It goes into the file that is made, so it is the same wherever the same bytes lie.
        """
        if self.origin:
            return self.origin.fingerprint
        digest = hashlib.sha256()
        for key, blob in self.entries:
            digest.update(key.encode() + b"\0" + hashlib.sha256(blob).digest())
        for weight in self.weights:
            digest.update(f"{weight.name} {weight.shape} {weight.type}".encode())
            if self.blobs:
                continue
            step = max(1, SAMPLE // native.row_bytes(weight.type, weight.columns))
            for first in {0, weight.rows // 2, max(0, weight.rows - step)}:
                digest.update(weight.read(first, min(first + step, weight.rows)).tobytes())
        for stored in self.blobs:
            digest.update(f"{stored.path.name} {stored.size}".encode())
        for piece in samples(self.blobs):
            digest.update(piece.tobytes())
        return digest.hexdigest()[:32]

    @property
    def changed(self) -> int:
        """When the youngest of its files was last written, in nanoseconds; 0 where no file of it is
        here.
        """
        return max((file.stat().st_mtime_ns for file in self.files if file.exists()), default=0)


def stored_rows(file: Path, offset: int, width: int, name: str) -> "Callable[[int, int], U8]":
    """A reader of rows of `width` bytes that stand one after another in a file.

    It reads instead of mapping: a file that shrinks meanwhile is then a Refusal and not a dead
    process.
    """

    def read(first: int, last: int) -> "U8":
        import numpy as np

        try:
            data = np.fromfile(
                file, np.uint8, (last - first) * width, offset=offset + first * width
            )
        except OSError as error:
            raise Refusal(
                f"{file} cannot be read: {error.strerror}", hint="check the file and its disk"
            ) from None
        if data.size != (last - first) * width:
            raise Damaged(f"{file} ends within tensor {name}", hint="fetch the file again")
        return data.reshape(last - first, width)

    return read


def gathered(read: "Callable[[int, int], U8]", order: Sequence[int]) -> "Callable[[int, int], U8]":
    """The same rows in another order: row i of the result is row order[i] of the source.

    Reads the span that the wanted rows lie in; an order that stays within heads keeps that span
    small.
    """

    def read_ordered(first: int, last: int) -> "U8":
        wanted = order[first:last]
        low = min(wanted)
        return read(low, max(wanted) + 1)[[row - low for row in wanted]]

    return read_ordered
