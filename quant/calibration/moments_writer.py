"""A file of second moments that is laid out before the first text is read and then filled input by
input.

Inputs may be written in any order and in several runs. Once an input is on disk, it is marked with
the digest of its bytes; after a crash the next run finds the marks and writes only the missing
inputs.
"""

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from quant.calibration.imatrix_collector import DAMAGED
from quant.calibration.moments import COUNTS, FIRST, KEY, KIND, MIXED, SECOND, SQUARES, About
from quant.errors import Refusal
from quant.gguf import layout

F64 = NDArray[np.float64]
ALIGNMENT = 32
MARK = ".mark"  # I32 [8]: the sha256 of an input's bytes, zeros until it is written
UNFINISHED = "0" * 64
STEP = 128  # rows mirrored at a time: single rows would be a cache miss for each value


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a file: the weights that it enters, and the size of its matrices; `mixed` as in
    SecondMoments.
    """

    names: tuple[str, ...]
    columns: int
    matrices: int = 1
    mixed: bool = False


@dataclass(frozen=True)
class Gathered:
    """The sums of one input: x x^T [matrices, columns, columns], x [matrices, columns], and the
    number of rows [matrices]. Only the lower triangles are read, because the file's matrices are
    symmetric.
    """

    second: F64
    first: F64
    counts: F64

    @classmethod
    def of(cls, rows: NDArray[np.floating]) -> "Gathered":
        """Return the sums of rows [rows, columns] or [matrices, rows, columns], in float64."""
        rows = np.asarray(rows, np.float64).reshape(-1, *rows.shape[-2:])
        counts = np.full(len(rows), float(rows.shape[1]))
        return cls(rows.transpose(0, 2, 1) @ rows, rows.sum(1), counts)


class MomentFile:
    """The writer of a moments file, `.OUT.part` beside `out` until finish(). Use it in a `with`; an
    unfinished file is resumed by the next run.

    Raises UserError if the file cannot be written or the disk is too small.
    """

    def __init__(self, out: Path, about: About, inputs: Sequence[Input]) -> None:
        self.out, self.inputs = out, tuple(inputs)
        self.part = out.with_name(f".{out.name}.part")
        self.layout = _layout(about, self.inputs)
        self._slots = {slot.name: slot for slot in self.layout.slots}
        try:
            self._resume()
        except OSError as error:
            raise Refusal(
                f"cannot write {out}: {error.strerror}", hint="check the folder given to --moments"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _resume(self) -> None:
        """Resume an earlier run's file if its header is identical; otherwise start a new file."""
        if self.part.is_file():
            self._file = self.part.open("r+b")
            if self._file.read(len(self.layout.header)) == self.layout.header:
                return
            self._file.close()
            self.part.unlink()
        need, have = self.layout.nbytes, shutil.disk_usage(self.part.parent).free
        if need > have:
            raise Refusal(
                f"{self.out.parent} has {have:,} bytes free, the moments need {need:,}",
                hint=f"free {need - have:,} bytes, or give another path with --moments",
            )
        self._file = self.part.open("w+b")
        self._file.write(self.layout.header)
        self._file.truncate(self.layout.nbytes)
        self._sync()

    @property
    def done(self) -> frozenset[int]:
        """Numbers of the inputs that are written."""
        return frozenset(
            number for number in range(len(self.inputs)) if self._mark(number).strip(b"\0")
        )

    def put(self, number: int, gathered: Gathered) -> None:
        """Write one input and sync it to disk. Raises UserError if its values are not finite."""
        entry, sha = self.inputs[number], hashlib.sha256()
        assert gathered.second.shape == (entry.matrices, entry.columns, entry.columns), (
            entry,
            gathered.second.shape,
        )
        diagonal = gathered.second.diagonal(axis1=1, axis2=2)
        # finite squares suffice: |x y| <= (x^2 + y^2) / 2
        if not (np.isfinite(diagonal).all() and np.isfinite(gathered.first).all()):
            raise Refusal(f"the input of {entry.names[0]} is not finite", hint=DAMAGED)
        for matrix, square in enumerate(gathered.second):
            self._write_matrix(self._slots[f"{number}{SECOND}"].offset, matrix, square, sha)
        for end, values in ((SQUARES, diagonal), (FIRST, gathered.first)):
            self._write(
                self._slots[f"{number}{end}"].offset, np.ascontiguousarray(values, "<f4"), sha
            )
        self._write(
            self._slots[f"{number}{COUNTS}"].offset,
            np.ascontiguousarray(gathered.counts, "<f8"),
            sha,
        )
        self._sync()
        self._write_at(self._slots[f"{number}{MARK}"].offset, sha.digest())
        self._sync()

    def finish(self) -> None:
        """Write the file's digest and rename it to its final name."""
        assert len(self.done) == len(self.inputs), self.done
        sha = hashlib.sha256(b"".join(self._mark(number) for number in range(len(self.inputs))))
        self._write_at(self.layout.header.index(UNFINISHED.encode()), sha.hexdigest().encode())
        self._sync()
        self._file.close()
        self.part.replace(self.out)

    def _write_matrix(self, offset: int, matrix: int, square: F64, sha: "hashlib._Hash") -> None:
        """Write the lower triangle and its mirror image, some rows at a time."""
        columns = len(square)
        for first in range(0, columns, STEP):
            last = first + STEP
            rows = np.array(square[first:last], "<f4")
            rows[:, last:] = square[last:, first:last].T
            corner = rows[:, first:last]
            corner[...] = np.tril(corner) + np.tril(corner, -1).T
            self._write(offset + 4 * columns * (matrix * columns + first), rows, sha)

    def _write(self, offset: int, values: NDArray[np.floating], sha: "hashlib._Hash") -> None:
        raw = values.tobytes()
        sha.update(raw)
        self._write_at(offset, raw)

    def _write_at(self, offset: int, raw: bytes) -> None:
        try:
            self._file.seek(offset)
            self._file.write(raw)
        except OSError as error:
            raise Refusal(
                f"cannot write {self.part}: {error.strerror}",
                hint="free disk space, then run the same command again",
            ) from None

    def _mark(self, number: int) -> bytes:
        self._file.seek(self._slots[f"{number}{MARK}"].offset)
        return self._file.read(32)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def write(
    path: Path, gathered: Sequence[tuple[Sequence[str], Gathered]], about: About | None = None
) -> Path:
    """Write a whole file at once from [(names of the weights, sums of their input), ..];
    MomentSums.from_rows(rows) computes the latter.

    moments.load_moments reads it. Tests of second-order methods need no model with it.
    """
    inputs = [
        Input(tuple(names), sums.second.shape[-1], len(sums.second)) for names, sums in gathered
    ]
    with MomentFile(path, about or About(), inputs) as file:
        for number, (_, sums) in enumerate(gathered):
            file.put(number, sums)
        file.finish()
    return path


def _layout(about: About, inputs: tuple[Input, ...]) -> layout.Layout:
    names = [(name, number) for number, entry in enumerate(inputs) for name in entry.names]
    entries = [
        ("general.type", layout.entry("string", KIND)),
        (KEY + "digest", layout.entry("string", UNFINISHED)),
        (KEY + "model", layout.entry("string", about.model)),
        (KEY + "chunk_size", layout.entry("uint32", about.chunk_size)),
        (KEY + "chunks", layout.entry("uint32", about.chunks)),
        (KEY + "texts", layout.entry("array:string", list(about.texts))),
        (KEY + "datasets", layout.entry("array:string", list(about.datasets))),
        (KEY + "transform", layout.entry("string", about.transform)),
        (KEY + "weights", layout.entry("array:string", [name for name, _ in names])),
        (KEY + "inputs", layout.entry("array:uint32", [number for _, number in names])),
    ]
    if mixed := [number for number, entry in enumerate(inputs) if entry.mixed]:
        entries.append((MIXED, layout.entry("array:uint32", mixed)))
    tensors: list[tuple[str, tuple[int, ...], str]] = []
    for number, entry in enumerate(inputs):
        tensors += [
            (f"{number}{SECOND}", (entry.columns, entry.columns, entry.matrices), "F32"),
            (f"{number}{SQUARES}", (entry.columns, entry.matrices), "F32"),
            (f"{number}{FIRST}", (entry.columns, entry.matrices), "F32"),
            (f"{number}{COUNTS}", (entry.matrices,), "F64"),
            (f"{number}{MARK}", (8,), "I32"),
        ]
    return layout.layout(entries, tensors, ALIGNMENT)
