"""A file of second moments in the making: laid out whole before the first text is read, filled
input by input.

Inputs may come in any order and in several runs. Each is marked by the digest of what it holds once
the disk has it; a run that was killed finds the marks and goes on with what is missing. It knows
the form (moments.py), no models.
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

from quant import writer
from quant.calibrate import DAMAGED
from quant.errors import Refusal
from quant.moments import COUNTS, FIRST, KEY, KIND, MIXED, SECOND, SQUARES, About

F64 = NDArray[np.float64]
ALIGNMENT = 32
MARK = ".mark"  # I32 [8]: the sha256 of an input's bytes, zeros until it is there
UNFINISHED = "0" * 64
STEP = 128  # rows mirrored at a time: one by one each value is a cache miss


@dataclass(frozen=True, slots=True)
class Input:
    """What a file will hold of one input: the weights it enters, and the size of its matrices;
    `mixed` as Second has it.
    """

    names: tuple[str, ...]
    columns: int
    matrices: int = 1
    mixed: bool = False


@dataclass(frozen=True)
class Gathered:
    """What was gathered of one input: sum of x x^T [matrices, columns, columns], sum of x
    [matrices, columns], and the rows that were added up [matrices]. Only the lower triangles are
    looked at: the file's matrices are symmetric.
    """

    second: F64
    first: F64
    counts: F64

    @classmethod
    def of(cls, rows: NDArray[np.floating]) -> "Gathered":
        """Of rows [rows, columns], or [matrices, rows, columns], in float64."""
        rows = np.asarray(rows, np.float64).reshape(-1, *rows.shape[-2:])
        counts = np.full(len(rows), float(rows.shape[1]))
        return cls(rows.transpose(0, 2, 1) @ rows, rows.sum(1), counts)


class MomentFile:
    """`.OUT.part` beside `out` until `finish`: to be used in a `with`, which leaves what is there
    to be gone on with.

    Raises Refusal where it cannot be written, or the disk is too small.
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
        """Take up what an earlier run left, if its header is the same to the bit; else begin."""
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
                hint=f"free {need - have:,} bytes, or name another place with --moments",
            )
        self._file = self.part.open("w+b")
        self._file.write(self.layout.header)
        self._file.truncate(self.layout.nbytes)
        self._sync()

    @property
    def done(self) -> frozenset[int]:
        """The inputs that are there."""
        return frozenset(
            number for number in range(len(self.inputs)) if self._mark(number).strip(b"\0")
        )

    def put(self, number: int, gathered: Gathered) -> None:
        """Write one input and let the disk have it; raises Refusal where it holds what is not
        finite.
        """
        one, sha = self.inputs[number], hashlib.sha256()
        assert gathered.second.shape == (one.matrices, one.columns, one.columns), (
            one,
            gathered.second.shape,
        )
        diagonal = gathered.second.diagonal(axis1=1, axis2=2)
        if not (
            np.isfinite(diagonal).all() and np.isfinite(gathered.first).all()
        ):  # |x y| <= (x^2 + y^2) / 2
            raise Refusal(f"the input of {one.names[0]} is not finite", hint=DAMAGED)
        for matrix, square in enumerate(gathered.second):
            self._matrix(self._slots[f"{number}{SECOND}"].offset, matrix, square, sha)
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
        self._at(self._slots[f"{number}{MARK}"].offset, sha.digest())
        self._sync()

    def finish(self) -> None:
        """Give the file its digest and its name."""
        assert len(self.done) == len(self.inputs), self.done
        sha = hashlib.sha256(b"".join(self._mark(number) for number in range(len(self.inputs))))
        self._at(self.layout.header.index(UNFINISHED.encode()), sha.hexdigest().encode())
        self._sync()
        self._file.close()
        self.part.replace(self.out)

    def _matrix(self, offset: int, matrix: int, square: F64, sha: "hashlib._Hash") -> None:
        """The lower triangle and its mirror, some rows at a time."""
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
        self._at(offset, raw)

    def _at(self, offset: int, raw: bytes) -> None:
        try:
            self._file.seek(offset)
            self._file.write(raw)
        except OSError as error:
            raise Refusal(
                f"cannot write {self.part}: {error.strerror}", hint="make room, then type the same"
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
    """A whole file at once, from [(names of the weights, what entered them), ..];
    `Gathered.of(rows)` makes the latter.

    `moments.load` reads it: all that tests of second-order methods need, without any model.
    """
    inputs = [Input(tuple(names), one.second.shape[-1], len(one.second)) for names, one in gathered]
    with MomentFile(path, about or About(), inputs) as file:
        for number, (_, one) in enumerate(gathered):
            file.put(number, one)
        file.finish()
    return path


def _layout(about: About, inputs: tuple[Input, ...]) -> writer.Layout:
    names = [(name, number) for number, one in enumerate(inputs) for name in one.names]
    entries = [
        ("general.type", writer.entry("string", KIND)),
        (KEY + "digest", writer.entry("string", UNFINISHED)),
        (KEY + "model", writer.entry("string", about.model)),
        (KEY + "chunk_size", writer.entry("uint32", about.chunk_size)),
        (KEY + "chunks", writer.entry("uint32", about.chunks)),
        (KEY + "texts", writer.entry("array:string", list(about.texts))),
        (KEY + "datasets", writer.entry("array:string", list(about.datasets))),
        (KEY + "transform", writer.entry("string", about.transform)),
        (KEY + "weights", writer.entry("array:string", [name for name, _ in names])),
        (KEY + "inputs", writer.entry("array:uint32", [number for _, number in names])),
    ]
    if mixed := [number for number, one in enumerate(inputs) if one.mixed]:
        entries.append((MIXED, writer.entry("array:uint32", mixed)))
    tensors: list[tuple[str, tuple[int, ...], str]] = []
    for number, one in enumerate(inputs):
        tensors += [
            (f"{number}{SECOND}", (one.columns, one.columns, one.matrices), "F32"),
            (f"{number}{SQUARES}", (one.columns, one.matrices), "F32"),
            (f"{number}{FIRST}", (one.columns, one.matrices), "F32"),
            (f"{number}{COUNTS}", (one.matrices,), "F64"),
            (f"{number}{MARK}", (8,), "I32"),
        ]
    return writer.layout(entries, tensors, ALIGNMENT)
