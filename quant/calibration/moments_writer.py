"""Writes moments files. The whole file is laid out before the first text is read, and then filled
one input at a time.

Inputs may be written in any order and in several runs. Once an input is on disk, the sha256 of its
bytes is written to the file as its mark. After a crash, the next run compares the marks with the
bytes, and writes only the inputs whose mark is missing or wrong.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from quant.calibration.imatrix_collector import DAMAGED_HINT
from quant.calibration.moments import (
    COUNTS_SUFFIX,
    FIRST_SUFFIX,
    KEY_PREFIX,
    MIXED_KEY,
    SECOND_SUFFIX,
    SQUARES_SUFFIX,
    MomentsOrigin,
)
from quant.calibration.text_record import TextRecord
from quant.calibration.triangle import Triangle, triangle_size, whole_matrix
from quant.disk_space import require_disk_space
from quant.errors import UserError
from quant.gguf import layout
from quant.gguf.resumable_writer import sync_folder
from quant.link_safety import open_without_links
from quant.model_file.load_checks import MOMENTS_TYPE

F64 = NDArray[np.float64]
ALIGNMENT_BYTES = 32
MARK_SUFFIX = ".mark"  # I32 [8], the sha256 of an input's bytes; zeros until the input is written
# the tensors of an input that its mark is the digest of, in this order
DATA_SUFFIXES = (SECOND_SUFFIX, SQUARES_SUFFIX, FIRST_SUFFIX, COUNTS_SUFFIX)
BLOCK_BYTES = 1 << 22  # that are hashed at a time
UNFINISHED_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True)
class MomentsInput:
    """One input of a moments file: the names of the weights that share it, its number of columns,
    and its number of matrices (experts). `mixed` is as in StoredMoments.
    """

    names: tuple[str, ...]
    columns: int
    matrices: int = 1
    mixed: bool = False


@dataclass(frozen=True)
class MomentSums:
    """The sums over the rows x of one input: `second` has the lower triangles of the sums of x x^T
    [matrices, triangle_size(columns)], `first` is the sum of x [matrices, columns], and `counts` is
    the number of rows [matrices].
    """

    second: F64
    first: F64
    counts: F64

    @classmethod
    def zeros(cls, matrices: int, columns: int) -> Self:
        """Return the sums over no rows."""
        return cls(
            np.zeros((matrices, triangle_size(columns))),
            np.zeros((matrices, columns)),
            np.zeros(matrices),
        )

    @classmethod
    def from_matrices(cls, second: NDArray[np.floating], first: F64, counts: F64) -> Self:
        """Return the sums with these sums of x x^T [matrices, columns, columns]."""
        sums = cls.zeros(*first.shape)
        for matrix, whole in enumerate(second):
            sums.triangle(matrix).add_matrix(whole)
        return cls(sums.second, first, counts)

    @classmethod
    def from_rows(cls, rows: NDArray[np.floating]) -> Self:
        """Return the sums of rows of shape [rows, columns] or [matrices, rows, columns], computed
        in float64.
        """
        rows = np.asarray(rows, np.float64).reshape(-1, *rows.shape[-2:])
        counts = np.full(len(rows), float(rows.shape[1]))
        return cls.from_matrices(rows.transpose(0, 2, 1) @ rows, rows.sum(1), counts)

    @property
    def columns(self) -> int:
        """The number of columns of the rows."""
        return int(self.first.shape[1])

    def triangle(self, matrix: int) -> Triangle:
        """Return the sum of x x^T of one matrix, which can be changed."""
        return Triangle(self.second[matrix], self.columns)


class MomentsWriter:
    """A writer of one moments file. It writes to `.NAME.part` in the folder of `out`, which
    finish() renames to `out`. If an earlier run left an unfinished file with an identical header,
    that file is completed.

    Use the writer in a `with` statement, which closes the file. Raises UserError if the file cannot
    be written or the disk is too small.
    """

    def __init__(self, out: Path, origin: MomentsOrigin, inputs: Sequence[MomentsInput]) -> None:
        self.out, self.inputs, self.origin = out, tuple(inputs), origin
        self.part_path = out.with_name(f".{out.name}.part")
        self.layout = _layout(origin, self.inputs)
        self._is_whole = False  # whether the file has more than the matrices' triangles
        self._slots = {slot.name: slot for slot in self.layout.slots}
        self._finished: set[int] = set()
        try:
            self._resume()
        except OSError as error:
            raise UserError(
                f"cannot write {out}: {error.strerror}", hint="check the folder given to --moments"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _resume(self) -> None:
        """Open an earlier run's file if its header is identical, else start a new file."""
        if self.part_path.is_file():
            self._file = open_without_links(self.part_path, "r+b")
            # earlier versions recorded only the names of the texts, and wrote whole matrices
            names_only = replace(self.origin, text=TextRecord(self.origin.text.names))
            for origin, is_whole in product((self.origin, names_only), (False, True)):
                file_layout = _layout(origin, self.inputs, is_whole=is_whole)
                self._file.seek(0)
                if self._file.read(len(file_layout.header)) == file_layout.header:
                    self.layout, self._is_whole = file_layout, is_whole
                    self._slots = {slot.name: slot for slot in file_layout.slots}
                    self._finished = set(filter(self._is_intact, range(len(self.inputs))))
                    return
            self._file.close()
            self.part_path.unlink()
        require_disk_space(
            self.out.parent,
            self.layout.nbytes,
            "the moments need",
            "or give another path with --moments",
        )
        self._file = open_without_links(self.part_path, "w+b")
        self._file.write(self.layout.header)
        self._file.truncate(self.layout.nbytes)
        self._sync()

    @property
    def finished_inputs(self) -> frozenset[int]:
        """The numbers of the inputs that are completely in the file."""
        return frozenset(self._finished)

    def write_input(self, number: int, sums: MomentSums) -> None:
        """Write the sums of input `number`, sync them to disk, and then write its mark. Raises
        UserError if a sum is not finite.
        """
        entry, sha = self.inputs[number], hashlib.sha256()
        assert sums.first.shape == (entry.matrices, entry.columns), (entry, sums.first.shape)
        triangles = [sums.triangle(matrix) for matrix in range(entry.matrices)]
        diagonal = np.stack([triangle.diagonal() for triangle in triangles])
        # finite squares suffice: |x y| <= (x^2 + y^2) / 2
        if not (np.isfinite(diagonal).all() and np.isfinite(sums.first).all()):
            raise UserError(f"the input of {entry.names[0]} is not finite", hint=DAMAGED_HINT)
        for matrix, triangle in enumerate(triangles):
            self._write_matrix(
                self._slots[f"{number}{SECOND_SUFFIX}"].offset, matrix, triangle, sha
            )
        for suffix, values in ((SQUARES_SUFFIX, diagonal), (FIRST_SUFFIX, sums.first)):
            self._write(
                self._slots[f"{number}{suffix}"].offset, np.ascontiguousarray(values, "<f4"), sha
            )
        self._write(
            self._slots[f"{number}{COUNTS_SUFFIX}"].offset,
            np.ascontiguousarray(sums.counts, "<f8"),
            sha,
        )
        self._sync()
        self._write_at(self._slots[f"{number}{MARK_SUFFIX}"].offset, sha.digest())
        self._sync()
        self._finished.add(number)

    def finish(self) -> None:
        """Write the digest of all inputs into the header, and give the file its final name. All
        inputs must be written.
        """
        assert len(self.finished_inputs) == len(self.inputs), self.finished_inputs
        sha = hashlib.sha256(b"".join(self._mark(number) for number in range(len(self.inputs))))
        self._write_at(
            self.layout.header.index(UNFINISHED_DIGEST.encode()), sha.hexdigest().encode()
        )
        self._sync()
        self._file.close()
        self.part_path.replace(self.out)
        sync_folder(self.out.parent)

    def _write_matrix(
        self, offset: int, matrix: int, triangle: Triangle, sha: "hashlib._Hash"
    ) -> None:
        """Write the sums of one matrix in float32. `offset` is the position of the input's matrices
        in the file, and `matrix` the number of this one. The written bytes are added to the digest
        `sha`.
        """
        columns, stripes = triangle.columns, triangle.read_stripes()
        offset += 4 * matrix * (columns**2 if self._is_whole else triangle_size(columns))
        for part in [whole_matrix(stripes, columns)] if self._is_whole else stripes:
            self._write(offset, part, sha)
            offset += part.nbytes

    def _write(self, offset: int, values: NDArray[np.floating], sha: "hashlib._Hash") -> None:
        raw = values.tobytes()
        sha.update(raw)
        self._write_at(offset, raw)

    def _write_at(self, offset: int, raw: bytes) -> None:
        try:
            self._file.seek(offset)
            self._file.write(raw)
        except OSError as error:
            raise UserError(
                f"cannot write {self.part_path}: {error.strerror}",
                hint="free disk space, then run the same command again",
            ) from None

    def _mark(self, number: int) -> bytes:
        self._file.seek(self._slots[f"{number}{MARK_SUFFIX}"].offset)
        return self._file.read(32)

    def _is_intact(self, number: int) -> bool:
        """Return whether the mark of an input is the sha256 of its bytes in the file."""
        mark, sha = self._mark(number), hashlib.sha256()
        if not mark.strip(b"\0"):
            return False
        for suffix in DATA_SUFFIXES:
            slot = self._slots[f"{number}{suffix}"]
            self._file.seek(slot.offset)
            left = slot.nbytes
            while left and (raw := self._file.read(min(left, BLOCK_BYTES))):
                sha.update(raw)
                left -= len(raw)
        return sha.digest() == mark

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def write_moments(
    path: Path,
    inputs_with_sums: Sequence[tuple[Sequence[str], MomentSums]],
    origin: MomentsOrigin | None = None,
) -> Path:
    """Write a complete moments file and return its path. `inputs_with_sums` has one pair for each
    input: the names of the weights that share it, and its sums (see MomentSums.from_rows).

    Tests of second-order methods use this function to get moments without a model.
    """
    inputs = [
        MomentsInput(tuple(names), sums.columns, len(sums.second))
        for names, sums in inputs_with_sums
    ]
    with MomentsWriter(path, origin or MomentsOrigin(), inputs) as writer:
        for number, (_, sums) in enumerate(inputs_with_sums):
            writer.write_input(number, sums)
        writer.finish()
    return path


def _layout(
    origin: MomentsOrigin, inputs: tuple[MomentsInput, ...], *, is_whole: bool = False
) -> layout.FileLayout:
    """Return the header of the file and the position of every tensor in it. With `is_whole`, it has
    whole matrices, as earlier versions wrote them.
    """
    names = [(name, number) for number, entry in enumerate(inputs) for name in entry.names]
    entries = [
        ("general.type", layout.encode_entry("string", MOMENTS_TYPE)),
        (KEY_PREFIX + "digest", layout.encode_entry("string", UNFINISHED_DIGEST)),
        (KEY_PREFIX + "model", layout.encode_entry("string", origin.model)),
        (KEY_PREFIX + "chunk_size", layout.encode_entry("uint32", origin.chunk_size)),
        (KEY_PREFIX + "chunks", layout.encode_entry("uint32", origin.chunks)),
        (KEY_PREFIX + "texts", layout.encode_entry("array:string", list(origin.texts))),
        (KEY_PREFIX + "datasets", layout.encode_entry("array:string", list(origin.text.names))),
        (KEY_PREFIX + "transform", layout.encode_entry("string", origin.transform)),
        (KEY_PREFIX + "weights", layout.encode_entry("array:string", [name for name, _ in names])),
        (
            KEY_PREFIX + "inputs",
            layout.encode_entry("array:uint32", [number for _, number in names]),
        ),
    ]
    if origin.text.kinds:
        kinds = layout.encode_entry("array:string", list(origin.text.kinds))
        entries.append((KEY_PREFIX + "text_kinds", kinds))
    if origin.text.windows:
        windows = layout.encode_entry("array:uint32", list(origin.text.windows))
        entries.append((KEY_PREFIX + "text_windows", windows))
    if mixed := [number for number, entry in enumerate(inputs) if entry.mixed]:
        entries.append((MIXED_KEY, layout.encode_entry("array:uint32", mixed)))
    tensors: list[tuple[str, tuple[int, ...], str]] = []
    for number, entry in enumerate(inputs):
        columns = entry.columns
        matrix = (columns, columns) if is_whole else (triangle_size(columns),)
        tensors += [
            (f"{number}{SECOND_SUFFIX}", (*matrix, entry.matrices), "F32"),
            (f"{number}{SQUARES_SUFFIX}", (entry.columns, entry.matrices), "F32"),
            (f"{number}{FIRST_SUFFIX}", (entry.columns, entry.matrices), "F32"),
            (f"{number}{COUNTS_SUFFIX}", (entry.matrices,), "F64"),
            (f"{number}{MARK_SUFFIX}", (8,), "I32"),
        ]
    return layout.lay_out_file(entries, tensors, ALIGNMENT_BYTES)
