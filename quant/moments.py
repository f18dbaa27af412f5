"""Second moments of what enters each weight: sum of x x^T over a text, one matrix for each distinct
input.

The file is a GGUF container of general.type "llmcli.moments". Weights that the same rows enter (q,
k and v; gate and up) share an input: the key `llmcli.moments.weights` lists the names,
`llmcli.moments.inputs` beside it the number N of the input of each. An input has the tensors

    N.second   F32 [columns, columns, matrices]   sum of x x^T, symmetric to the bit; one matrix for
    each expert N.squares  F32 [columns, matrices]            its diagonal again: an imatrix, read
    without the matrices N.first    F32 [columns, matrices]            sum of x N.counts   F64
    [matrices]                     how many rows were added up; 0 for an expert that was never seen

An input whose number is in the key `llmcli.moments.mixed` is what attention makes of the rows that
enter a layer's values: with the shares a of a query's keys it is the sum of a x, for each query and
each head, and counts are theirs.

It is read where it is wanted, matrix by matrix, and not mapped: a file that shrinks meanwhile is
then a Refusal and not a dead process. What writes it is momentfile.py. It knows names and matrices,
no models.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant import header
from quant.errors import Refusal
from quant.imatrix import CHUNKS, MAX_MATRICES, Entry, Imatrix, same_folds
from quant.soundness import MOMENTS

if TYPE_CHECKING:
    from quant.native import F32

KIND, KEY = MOMENTS, MOMENTS + "."
MIXED = KEY + "mixed"
SECOND, SQUARES, FIRST, COUNTS = ".second", ".squares", ".first", ".counts"
CHECKED = 16  # rows of a matrix that are held against its columns
AGAIN = "make it again: llmcli calibrate SRC -o STATS --moments FILE"


@dataclass(frozen=True, slots=True)
class About:
    """What moments were gathered from: `model` is the Source.fingerprint, `texts` are the sha256 of
    the chunks that were read and `datasets` their names, `transform` the digest of the folds that
    the model had ("" for none).
    """

    model: str = ""
    chunk_size: int = 512
    chunks: int = 0
    texts: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    transform: str = ""


@dataclass(frozen=True, slots=True)
class Second:
    """The moments of one input: `matrices` of [columns, columns] each, with the `counts` of rows
    added up in each.

    `names` are the weights that it enters; `mixed`: behind the attention that mixes what comes out
    of them. Everything is read from the file at each call, nothing is kept.
    """

    file: Path
    names: tuple[str, ...]
    columns: int
    matrices: int
    counts: tuple[float, ...] = field(repr=False)
    offset: int
    importance: Entry = field(repr=False)
    firsts: int  # where the sums of x stand
    mixed: bool = False

    def sums(self, matrix: int = 0) -> "F32":
        """Sum of x x^T [columns, columns], symmetric; raises Refusal where the file holds something
        else.
        """
        import numpy as np

        size = self.columns * self.columns
        found = self._read(self.offset + 4 * size * matrix, size).reshape(
            self.columns, self.columns
        )
        step = max(1, self.columns // CHECKED)
        if not np.isfinite(found).all():
            raise self._bad("values that are not finite")
        if not np.array_equal(found[::step], found.T[::step]):
            raise self._bad("a matrix that is not symmetric")
        if not np.array_equal(found.diagonal(), self._squares(matrix)):
            raise self._bad("a matrix whose diagonal is not its sums of squares")
        return found

    def mean(self, matrix: int = 0) -> "F32":
        """Mean of x x^T [columns, columns], symmetric; of an expert never seen the identity, as an
        imatrix has ones.
        """
        import numpy as np

        count = self.counts[matrix]
        if not count:
            return np.eye(self.columns, dtype=np.float32)
        found = self.sums(matrix)
        found /= np.float32(count)
        return found

    def squares(self, matrix: int = 0) -> "F32":
        """Mean of x^2 [columns], the diagonal of mean(): what an imatrix holds; ones for an expert
        never seen.
        """
        return self.importance.vectors(matrix, matrix + 1, self.columns).reshape(self.columns)

    def first(self, matrix: int = 0) -> "F32":
        """Mean of x [columns]; zeros for an expert never seen."""
        import numpy as np

        found = self.first_sums(matrix)
        found /= np.float32(self.counts[matrix] or 1)
        return found

    def first_sums(self, matrix: int = 0) -> "F32":
        """Sum of x [columns]; raises Refusal where the file holds something else."""
        import numpy as np

        found = self._read(self.firsts + 4 * self.columns * matrix, self.columns)
        if not np.isfinite(found).all():
            raise self._bad("values that are not finite")
        return found

    @property
    def unseen(self) -> int:
        """Matrices that no row went to."""
        return self.counts.count(0)

    @property
    def thin(self) -> int:
        """Matrices with fewer rows than columns, but some: their rank is too low to be inverted
        without damping.
        """
        return sum(0 < count < self.columns for count in self.counts)

    @property
    def fewest(self) -> float:
        """Rows that were added up in that matrix which has the fewest of those that were seen."""
        return min((count for count in self.counts if count), default=0.0)

    def _squares(self, matrix: int) -> "F32":
        return self._read(self.importance.offset + 4 * self.columns * matrix, self.columns)

    def _read(self, offset: int, count: int) -> "F32":
        import numpy as np

        found: F32 = np.fromfile(self.file, "<f4", count, offset=offset)
        if found.size != count:
            raise Refusal(f"{self.file} has become shorter while it was read", hint=AGAIN)
        return found

    def _bad(self, why: str) -> Refusal:
        return Refusal(
            f"{self.file} is damaged: the second moments of {self.names[0]} hold {why}", hint=AGAIN
        )


@dataclass(frozen=True)
class Moments:
    """A whole file; `digest` tells its content, `path` is as the user gave it, `inputs` are the
    distinct ones.
    """

    path: Path
    digest: str
    about: About
    inputs: tuple[Second, ...]
    _of: Mapping[str, int] = field(repr=False)

    @property
    def names(self) -> frozenset[str]:
        """The weights that it speaks of."""
        return frozenset(self._of)

    def of(self, name: str) -> Second | None:
        """What enters the weight of this name."""
        number = self._of.get(name)
        return None if number is None else self.inputs[number]

    @property
    def imatrix(self) -> Imatrix:
        """The diagonals as an importance matrix: mean squares under each weight's name."""
        entries = {
            name: self.inputs[number].importance for name, number in sorted(self._of.items())
        }
        about = self.about
        return Imatrix(
            self.path,
            self.digest,
            entries,
            about.datasets,
            about.chunks,
            about.chunk_size,
            about.model,
            about.transform,
        )

    def fitting(
        self, tensors: Sequence[tuple[str, Sequence[int]]], transform: str = ""
    ) -> dict[str, Second]:
        """What it has of these tensors (name, shape with the row length first).

        Raises Refusal where one is of another size, as Imatrix.fitting does, and where they were
        gathered under another `transform` (the folds' digest) than the tensors have. The
        embedding's is passed over instead where its size is another: it may be read as rows, not
        multiplied.
        """
        same_folds(f"{self.path} holds the moments", self.about.transform, transform)
        found, wrong = {}, []
        for name, shape in tensors:
            known = self.of(name)
            if known is None:
                continue
            matrices = 1
            for size in shape[2:]:
                matrices *= size
            if (known.columns, known.matrices) == (shape[0], matrices):
                found[name] = known
            elif name not in ("token_embd.weight", "per_layer_token_embd.weight"):
                mine, yours = f"{known.matrices} x {known.columns}", f"{matrices} x {shape[0]}"
                wrong.append(f"{name} has {mine} columns, the tensor {yours}")
        if wrong:
            some = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            raise Refusal(
                f"{self.path} holds the moments of another model: {some}",
                hint="name this model's --moments",
            )
        return found


def recognised(path: Path) -> bool:
    """Whether a file says that it holds moments; nothing else of it is looked at."""
    try:
        part = header.parse(path)
    except Refusal:
        return False
    return any(item.key == "general.type" and item.value == KIND for item in part.fields)


def load(path: Path) -> Moments:
    """Index a file of moments; what cannot be right is a Refusal naming the file. The matrices stay
    in it.
    """
    part = header.parse(path)
    keys: dict[str, Any] = {item.key: item for item in part.fields}
    if "general.type" not in keys or keys["general.type"].value != KIND:
        hint = f"--imatrix {path} takes an imatrix" if CHUNKS in keys else AGAIN
        raise Refusal(f"{path} is a GGUF file but holds no moments", hint=hint)
    fields = _Fields(path, keys)
    about = About(
        fields.text("model"),
        fields.number("chunk_size"),
        fields.number("chunks"),
        fields.texts("texts"),
        fields.texts("datasets"),
        fields.text("transform"),
    )
    names, of = fields.texts("weights"), fields.numbers("inputs")
    if not names or len(names) != len(of) or len(set(names)) != len(names):
        raise _unsound(path, "its weights and their inputs do not belong together")
    tensors = {tensor.name: tensor for tensor in part.tensors}
    shared: dict[int, list[str]] = {}
    for name, number in zip(names, of, strict=True):
        shared.setdefault(number, []).append(name)
    if sorted(shared) != list(range(len(shared))):
        raise _unsound(path, "its inputs are not numbered from 0 on")
    mixed = fields.numbers("mixed") if MIXED in keys else ()
    inputs = tuple(
        replace(_second(path, number, tuple(shared[number]), tensors), mixed=number in mixed)
        for number in range(len(shared))
    )
    digest = fields.text("digest")
    if not digest or not digest.strip("0"):
        raise _unsound(path, "it was not finished")
    whole = hashlib.sha256(f"{digest} {about} {names} {of}".encode()).hexdigest()[:32]
    return Moments(path, whole, about, inputs, dict(zip(names, of, strict=True)))


def _second(
    path: Path, number: int, names: tuple[str, ...], tensors: Mapping[str, header.TensorInfo]
) -> Second:
    import numpy as np

    parts = [tensors.get(f"{number}{end}") for end in (SECOND, SQUARES, FIRST, COUNTS)]
    if not all(parts):
        raise _unsound(path, f"the moments of {names[0]} are not all there")
    second, squares, first, counts = (part for part in parts if part)
    columns, matrices = second.columns, counts.elements
    if (
        not 1 <= matrices <= MAX_MATRICES
        or {second.type, squares.type, first.type} != {"F32"}
        or counts.type != "F64"
        or second.elements != columns * columns * matrices
        or {squares.columns, first.columns} != {columns}
        or {squares.elements, first.elements} != {columns * matrices}
    ):
        raise _unsound(path, f"the moments of {names[0]} do not belong together")
    rows = np.fromfile(path, "<f8", matrices, offset=counts.offset)
    sums = np.fromfile(path, "<f4", columns * matrices, offset=squares.offset)
    if rows.size != matrices or not (np.isfinite(rows) & (rows >= 0)).all():
        raise _unsound(path, f"the counts of {names[0]} are no counts")
    if sums.size != columns * matrices or not (np.isfinite(sums) & (sums >= 0)).all():
        raise _unsound(path, f"{names[0]} holds values that are no sums of squares")
    entry = Entry(path, squares.offset, squares.elements, tuple(rows.tolist()))
    return Second(
        path, names, columns, matrices, entry.divisors, second.offset, entry, first.offset
    )


class _Fields:
    """The keys of a file, each held against the kind it must have."""

    def __init__(self, path: Path, keys: Mapping[str, header.Field]) -> None:
        self.path, self.keys = path, keys

    def text(self, name: str) -> str:
        value = self._of(name, "string").value
        assert isinstance(value, str)
        return value

    def number(self, name: str) -> int:
        value = self._of(name, "uint32").value
        assert isinstance(value, int)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(str(item) for item in self._array(name, "string"))

    def numbers(self, name: str) -> tuple[int, ...]:
        return tuple(int(item) for item in self._array(name, "uint32"))

    def _array(self, name: str, kind: str) -> list[Any]:
        value = self._of(name, "array").value
        assert isinstance(value, header.Array)
        if value.kind != kind:
            raise _unsound(
                self.path, f"its key {KEY}{name} is an array of {value.kind}, not of {kind}"
            )
        return list(value.values())

    def _of(self, name: str, kind: str) -> header.Field:
        found = self.keys.get(KEY + name)
        if found is None or found.kind != kind:
            what = "is not there" if found is None else f"is no {kind} but {found.kind}"
            raise _unsound(self.path, f"its key {KEY}{name} {what}")
        return found


def _unsound(path: Path, why: str) -> Refusal:
    return Refusal(f"{path} is no sound file of moments: {why}", hint=AGAIN)
