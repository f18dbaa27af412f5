"""Sources: models that can be written as a GGUF file, with metadata entries and weights that are
read by rows.

Weights are read in ranges of rows, so that memory stays bounded. quantize.write.open_gguf() and
convert.checkpoint_source.open_checkpoint() return sources.
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
from quant.source.blob import Blob, LocalFile, make_row_reader, read_row_samples, read_samples

if TYPE_CHECKING:
    from quant.native.ggml import U8

# Metadata keys that record the tokenizer's verification (tokenizer/verify/), and their beginning.
# They contain descriptions of the known differences, and strings that llama.cpp encodes differently
# for an unknown reason.
RECORD_PREFIX = "llmcli.tokenizer."
KNOWN_DIFFERENCES_KEY = f"{RECORD_PREFIX}known_differences"
DIFFERING_KEY = f"{RECORD_PREFIX}differing_strings"


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor. `shape` is in ggml's order (row length first), and `read(first, last)` returns
    rows first .. last as stored bytes [rows, row_bytes].

    Writing a file calls `read` from one thread: tensors in the order of the source, rows in
    ascending order, each row once, at most pipeline.SLAB_VALUES values at a time. After a resume it
    starts with the first row that is not written yet. `read` may be slow and does its own retries.
    The arrays that it returns must not change later, because other threads still use them. A
    UserError in `read` stops the run and keeps the partial output for a resume; a
    DamagedSourceError deletes the partial output.

    `stored_type` is the type in the source's file if `read` converts it to `type`, else "".
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
        """The number of rows over all other axes. In a stack of experts, these are the rows of all
        experts.
        """
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
        """The size in bytes, stored as `type`."""
        return self.rows * ggml.row_bytes(self.type, self.columns)


@dataclass(frozen=True)
class Source:
    """A model to write, from a GGUF file or a checkpoint folder at `path`.

    `entries` are metadata entries (key, stored type number and value) in the order of the new file.
    `files` are the files that the model is read from. `alignment` is in bytes.
    """

    path: Path
    files: tuple[Path, ...]
    name: str
    facts: ModelFacts
    entries: tuple[tuple[str, bytes], ...]
    weights: tuple[Weight, ...]
    alignment: int
    notes: tuple[str, ...] = ()  # remarks on this source for the user
    warnings: tuple[str, ...] = ()  # problems of the new file, for the user
    dtype: str = "F32"  # the type in which most of the floats are stored
    # The files of the weights if they are slow to read: then the fingerprint takes only a few
    # samples.
    blobs: tuple[Blob, ...] = ()
    origin: "Source | None" = None  # the source before folds were applied (quant/folds)
    # digest of the folds of an earlier run, which made this source's file from a folded model
    transform_digest: str = ""
    fold_digest: str = ""  # digest of the folds that were applied to `origin`
    fold_label: str = ""  # the kinds of folds that were applied to `origin`

    @cached_property
    def fingerprint(self) -> str:
        """A digest that identifies the source: of its metadata, shapes, types and samples of the
        stored bytes. Folds do not change it: if there is an `origin`, it is the origin's
        fingerprint.

        The digest is written into new files, so it must not depend on where the bytes are stored,
        nor on the records of the tokenizer's verification, which are texts for the user.
        """
        if self.origin:
            return self.origin.fingerprint
        digest = hashlib.sha256()
        for key, stored_value in self.entries:
            if key.startswith(RECORD_PREFIX):
                continue
            digest.update(key.encode() + b"\0" + hashlib.sha256(stored_value).digest())
        for weight in self.weights:
            digest.update(f"{weight.name} {weight.shape} {weight.type}".encode())
            if self.blobs:
                continue
            row_bytes = ggml.row_bytes(weight.type, weight.columns)
            for sample in read_row_samples(weight.read, weight.rows, row_bytes):
                digest.update(sample.tobytes())
        for blob in self.blobs:
            digest.update(f"{blob.path.name} {blob.size}".encode())
        for sample in read_samples(self.blobs):
            digest.update(sample.tobytes())
        return digest.hexdigest()[:32]

    @property
    def newest_mtime_ns(self) -> int:
        """The newest modification time of the source's files in nanoseconds; 0 if none of the files
        is on this disk.
        """
        return max((file.stat().st_mtime_ns for file in self.files if file.exists()), default=0)


def make_file_row_reader(
    file: Path, offset: int, width: int, name: str
) -> "Callable[[int, int], U8]":
    """Return a function that reads rows of `width` bytes of the tensor `name`, which are stored one
    after another from `offset` on in a file.

    The function is read(first, last), which returns bytes [last - first, width]. It raises
    DamagedSourceError, with the tensor's name, if the file is too short.
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
    """Return a function that reads the rows in another order: row i of the result is row order[i]
    of `read`.

    It reads the whole range between the first and the last row that are needed. The range is small
    if rows move only within heads.
    """

    def read_ordered(first: int, last: int) -> "U8":
        rows = order[first:last]
        lowest = min(rows)
        return read(lowest, max(rows) + 1)[[row - lowest for row in rows]]

    return read_ordered
