"""What can be written as a GGUF file, however it is stored: metadata entries, and weights read by
rows.

Weights can be read in pieces, so that memory stays bounded. Sources come from quantize.open_gguf()
and convert.open_checkpoint().
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from quant.errors import DamagedSourceError
from quant.native import ggml
from quant.recipes.file_types import ModelFacts
from quant.source.blob import Blob, LocalFile, make_row_reader, read_samples

if TYPE_CHECKING:
    from quant.native.ggml import U8

SAMPLE_BYTES = 4096  # bytes of each of a tensor's three samples in the fingerprint


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor: `shape` in ggml's order; `read(first, last)` returns stored rows as bytes `[rows,
    row_bytes]`.

    Writing calls `read` from one thread, ahead of need: tensors in the order of the source, rows
    ascending, each row once, at most pipeline.SLAB values at a time, from the first missing row
    after a resume. `read` may be slow and does its own retries. The arrays it returned must not
    change later, because others still use them. A UserError stops the run and keeps the partial
    output for a resume; a DamagedSourceError deletes it. `stored` is the type in the file if
    reading converts it to another one.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    read: "Callable[[int, int], U8]" = field(repr=False)
    stored_type: str = ""

    @property
    def columns(self) -> int:
        """The number of values in a row."""
        return self.shape[0]

    @property
    def rows(self) -> int:
        """The number of rows over all further axes; a mixture's experts follow one another."""
        rows = 1
        for size in self.shape[1:]:
            rows *= size
        return rows

    @property
    def elements(self) -> int:
        """The number of values."""
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """The size in bytes in the present type."""
        return self.rows * ggml.row_bytes(self.type, self.columns)


@dataclass(frozen=True)
class Source:
    """A model to write.

    `entries` are (key, stored type and value) in the order of the new file.
    """

    path: Path
    files: tuple[Path, ...]
    name: str
    facts: ModelFacts
    entries: tuple[tuple[str, bytes], ...]
    weights: tuple[Weight, ...]
    alignment: int
    notes: tuple[str, ...] = ()  # for the user, about this source
    warnings: tuple[str, ...] = ()  # for the user, about problems of the new file
    dtype: str = "F32"  # what most of its floats are stored as
    # Where the weights are stored, if the fingerprint must take few reads.
    blobs: tuple[Blob, ...] = ()
    origin: "Source | None" = None  # the source before exact rescaling (quant/folds)
    transform_digest: str = ""  # digest of the folds under which its files were made
    fold_digest: str = ""  # digest of the folds from `origin` to this source
    fold_label: str = ""  # how those folds were chosen

    @cached_property
    def fingerprint(self) -> str:
        """A digest that identifies the source: metadata, shapes, types and samples of the stored
        bytes.

        It is that of `origin` if there is one. It is written into new files, so it is the same
        wherever the same bytes are stored.
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
            step = max(1, SAMPLE_BYTES // ggml.row_bytes(weight.type, weight.columns))
            for first in {0, weight.rows // 2, max(0, weight.rows - step)}:
                digest.update(weight.read(first, min(first + step, weight.rows)).tobytes())
        for source_blob in self.blobs:
            digest.update(f"{source_blob.path.name} {source_blob.size}".encode())
        for piece in read_samples(self.blobs):
            digest.update(piece.tobytes())
        return digest.hexdigest()[:32]

    @property
    def newest_mtime_ns(self) -> int:
        """The newest modification time of its files in nanoseconds; 0 if none is on this disk."""
        return max((file.stat().st_mtime_ns for file in self.files if file.exists()), default=0)


def make_file_row_reader(
    file: Path, offset: int, width: int, name: str
) -> "Callable[[int, int], U8]":
    """Return a reader of rows of `width` bytes, stored one after another in a file.

    Errors name the tensor. Shapes: `read(first, last)` gives `[last - first, width]`.
    """

    read_rows = make_row_reader(LocalFile(file), offset, width)

    def read(first: int, last: int) -> "U8":
        try:
            return read_rows(first, last)
        except DamagedSourceError:
            raise DamagedSourceError(
                f"{file} ends inside tensor {name}", hint="fetch the file again"
            ) from None

    return read


def reorder_rows(
    read: "Callable[[int, int], U8]", order: Sequence[int]
) -> "Callable[[int, int], U8]":
    """Return a reader of the same rows in another order: row i of the result is row order[i] of the
    source.

    It reads the whole span between the wanted rows, which is small for orders within heads.
    """

    def read_ordered(first: int, last: int) -> "U8":
        wanted = order[first:last]
        low = min(wanted)
        return read(low, max(wanted) + 1)[[row - low for row in wanted]]

    return read_ordered
