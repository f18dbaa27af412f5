"""Second moments of the inputs of weights: the sum of x x^T over the input rows x of a text, one
matrix for each distinct input.

The file is a GGUF container of general.type "llmcli.moments". Weights with the same input rows (q,
k and v; gate and up) share an input. The key `llmcli.moments.weights` lists the names of the
weights, and `llmcli.moments.inputs` lists, in the same order, the number N of each weight's input.
Each input has these tensors:

- N.second, F32 [triangle_size(columns), matrices]: the lower triangle of the sum of x x^T in the
  stripes of triangle.py, with exactly symmetric squares on the diagonal; one for each expert.
  Earlier versions wrote whole matrices [columns, columns, matrices], which are read, too
- N.squares, F32 [columns, matrices]: the diagonal of N.second, stored again so that it can be read
  as an imatrix without reading the matrices
- N.first, F32 [columns, matrices]: the sum of x
- N.counts, F64 [matrices]: the number of rows that were added; 0 for an expert without tokens

The key `llmcli.moments.mixed` lists the numbers of the inputs of value weights
(attention_moments.py). For these, x is not a row that enters the weight, but a mixture of such
rows: for each query and each head, the sum of the rows weighted by the query's attention to them.
The counts are then numbers of mixtures.

Matrices are read from the file when they are needed. They are not memory-mapped, so that a file
that becomes shorter meanwhile raises UserError instead of crashing the process. moments_writer.py
writes these files.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.calibration.imatrix import (
    CHUNKS_KEY,
    MAX_MATRICES,
    Imatrix,
    ImatrixEntry,
    require_same_folds,
    require_same_model,
)
from quant.calibration.text_record import UNKNOWN_TEXT, TextRecord
from quant.calibration.triangle import stripe_rows, triangle_size, whole_matrix
from quant.errors import UserError
from quant.gguf import header
from quant.model_file.load_checks import MOMENTS_TYPE
from quant.recipes.tensor_types import EMBEDDING_NAMES

if TYPE_CHECKING:
    from quant.native.ggml import F32

KEY_PREFIX = MOMENTS_TYPE + "."
MIXED_KEY = KEY_PREFIX + "mixed"
SECOND_SUFFIX, SQUARES_SUFFIX, FIRST_SUFFIX, COUNTS_SUFFIX = (
    ".second",
    ".squares",
    ".first",
    ".counts",
)
REMAKE_HINT = "make it again: llmcli calibrate SRC -o STATS --moments FILE"


@dataclass(frozen=True, slots=True)
class MomentsOrigin:
    """The model and the texts that moments were collected from.

    `model` is the Source.fingerprint of the model, and `transform` the digest of its folds ("" for
    none). The texts were read as `chunks` chunks of `chunk_size` tokens. `text` is about the texts,
    and `texts` are sha256 digests of the chunks that were read, one for each text.
    """

    model: str = ""
    chunk_size: int = 512
    chunks: int = 0
    texts: tuple[str, ...] = ()
    text: TextRecord = UNKNOWN_TEXT
    transform: str = ""


@dataclass(frozen=True, slots=True)
class StoredMoments:
    """The moments of one input in a file: `matrices` matrices of [columns, columns]. Each is a sum
    over as many rows as `counts` says for it.

    `names` are the weights that share the input. `mixed` means that the sums are over attention's
    mixtures of the rows (see the top of this module). `offset` is the position of the matrices in
    the file in bytes, and `is_whole` whether the file has more than their triangles. `importance`
    are the sums of squares as an imatrix has them. Each method call reads from the file.
    """

    file: Path
    names: tuple[str, ...]
    columns: int
    matrices: int
    counts: tuple[float, ...] = field(repr=False)
    offset: int
    importance: ImatrixEntry = field(repr=False)
    first_offset: int  # where the sums of x begin in the file
    mixed: bool = False
    is_whole: bool = False

    def sums(self, matrix: int = 0) -> "F32":
        """Return the sum of x x^T of one matrix, `[columns, columns]`, which is symmetric. Raises
        UserError if the file is damaged.
        """
        import numpy as np

        products = whole_matrix(self._stripes(matrix), self.columns)
        if not np.array_equal(products.diagonal(), self._squares(matrix)):
            raise self._damaged("contain a matrix whose diagonal is not its sums of squares")
        return products

    def mean(self, matrix: int = 0) -> "F32":
        """Return the mean of x x^T of one matrix, `[columns, columns]`, which is symmetric. For an
        expert without tokens it is the identity, and squares() returns ones accordingly.
        """
        import numpy as np

        count = self.counts[matrix]
        if not count:
            return np.eye(self.columns, dtype=np.float32)
        products = self.sums(matrix)
        products /= np.float32(count)
        return products

    def squares(self, matrix: int = 0) -> "F32":
        """Return the mean of x^2 of one matrix, `[columns]`. It is the diagonal of mean(), as an
        imatrix contains it; ones for an expert without tokens.
        """
        return self.importance.mean_squares(matrix, matrix + 1, self.columns).reshape(self.columns)

    def first_mean(self, matrix: int = 0) -> "F32":
        """Return the mean of x of one matrix, `[columns]`; zeros for an expert without tokens."""
        import numpy as np

        sums = self.first_sums(matrix)
        sums /= np.float32(self.counts[matrix] or 1)
        return sums

    def first_sums(self, matrix: int = 0) -> "F32":
        """Return the sum of x of one matrix, `[columns]`. Raises UserError if the file is
        damaged.
        """
        import numpy as np

        sums = self._read(self.first_offset + 4 * self.columns * matrix, self.columns)
        if not np.isfinite(sums).all():
            raise self._damaged("contain values that are not finite")
        return sums

    @property
    def unseen_matrices(self) -> int:
        """The number of matrices (experts) for which no row was added."""
        return self.counts.count(0)

    @property
    def thin_matrices(self) -> int:
        """The number of matrices that have rows, but fewer rows than columns. Such a matrix is
        singular and can be inverted only with damping.
        """
        return sum(0 < count < self.columns for count in self.counts)

    @property
    def fewest_rows(self) -> float:
        """The smallest number of rows that were added to a matrix, not counting matrices without
        rows; 0 if no matrix has rows.
        """
        return min((count for count in self.counts if count), default=0.0)

    def _stripes(self, matrix: int) -> "Iterator[F32]":
        """Yield the stripes of the triangle of one matrix. Raises UserError if they are damaged."""
        import numpy as np

        size = self.columns**2 if self.is_whole else triangle_size(self.columns)
        offset = self.offset + 4 * size * matrix
        for first, last in stripe_rows(self.columns):
            width = self.columns if self.is_whole else last
            stripe = self._read(offset, (last - first) * width).reshape(-1, width)
            offset += stripe.nbytes
            if not np.isfinite(stripe).all():
                raise self._damaged("contain values that are not finite")
            square = stripe[:, first:last]
            if not np.array_equal(square, square.T):
                raise self._damaged("contain a matrix that is not symmetric")
            yield stripe[:, :last]

    def _squares(self, matrix: int) -> "F32":
        return self._read(self.importance.offset + 4 * self.columns * matrix, self.columns)

    def _read(self, offset: int, count: int) -> "F32":
        import numpy as np

        values: F32 = np.fromfile(self.file, "<f4", count, offset=offset)
        if values.size != count:
            raise UserError(f"{self.file} became shorter while it was read", hint=REMAKE_HINT)
        return values

    def _damaged(self, why: str) -> UserError:
        return UserError(
            f"{self.file} is damaged: the second moments of {self.names[0]} {why}", hint=REMAKE_HINT
        )


@dataclass(frozen=True)
class MomentsFile:
    """An open moments file. `digest` identifies its content, `path` is the path as the user gave
    it, and `inputs` are the distinct inputs.
    """

    path: Path
    digest: str
    origin: MomentsOrigin
    inputs: tuple[StoredMoments, ...]
    _input_numbers: Mapping[str, int] = field(repr=False)

    @property
    def names(self) -> frozenset[str]:
        """The names of the weights whose moments are in the file."""
        return frozenset(self._input_numbers)

    def input_of(self, name: str) -> StoredMoments | None:
        """Return the moments of the input of a weight, or None if the file has none for it."""
        number = self._input_numbers.get(name)
        return None if number is None else self.inputs[number]

    @property
    def imatrix(self) -> Imatrix:
        """The diagonals of the moments as an importance matrix, with one entry for each weight."""
        entries = {
            name: self.inputs[number].importance
            for name, number in sorted(self._input_numbers.items())
        }
        origin = self.origin
        return Imatrix(
            self.path,
            self.digest,
            entries,
            origin.text,
            origin.chunks,
            origin.chunk_size,
            origin.model,
            origin.transform,
        )

    def match_tensors(
        self, tensors: Sequence[tuple[str, Sequence[int]]], transform: str = ""
    ) -> dict[str, StoredMoments]:
        """Return the moments of the inputs of those `tensors` that have some, by name. `tensors`
        are pairs of a name and a shape with the row length first; `transform` is the digest of this
        model's folds.

        An embedding's moments of the wrong size are ignored, because an embedding's rows may be
        looked up instead of multiplied. Raises UserError if any other moments have the wrong size,
        or if they were collected with different folds.
        """
        require_same_folds(f"{self.path} contains the moments", self.origin.transform, transform)
        inputs, wrong = {}, []
        for name, shape in tensors:
            stored = self.input_of(name)
            if stored is None:
                continue
            matrices = math.prod(shape[2:])
            if (stored.columns, stored.matrices) == (shape[0], matrices):
                inputs[name] = stored
            elif name not in EMBEDDING_NAMES:
                stored_size, tensor_size = (
                    f"{stored.matrices} x {stored.columns}",
                    f"{matrices} x {shape[0]}",
                )
                wrong.append(f"{name} has {stored_size} columns, the tensor {tensor_size}")
        require_same_model(f"{self.path} contains the moments", wrong, "--moments")
        return inputs


def is_moments_file(path: Path) -> bool:
    """Return whether a GGUF file has the type of a moments file in its header. Nothing else is
    checked.
    """
    try:
        file_header = header.read_file_header(path)
    except UserError:
        return False
    return any(
        item.key == "general.type" and item.value == MOMENTS_TYPE for item in file_header.fields
    )


def load_moments(path: Path) -> MomentsFile:
    """Open a moments file. The matrices stay on disk. Raises UserError, with the file's path, if
    the file is invalid or was not finished.
    """
    file_header = header.read_file_header(path)
    keys: dict[str, Any] = {item.key: item for item in file_header.fields}
    if "general.type" not in keys or keys["general.type"].value != MOMENTS_TYPE:
        hint = f"--imatrix {path} takes an imatrix" if CHUNKS_KEY in keys else REMAKE_HINT
        raise UserError(f"{path} is a GGUF file without moments", hint=hint)
    fields = _Fields(path, keys)
    origin = MomentsOrigin(
        fields.text("model"),
        fields.number("chunk_size"),
        fields.number("chunks"),
        fields.texts("texts"),
        TextRecord(
            fields.texts("datasets"),
            fields.texts("text_kinds") if KEY_PREFIX + "text_kinds" in keys else (),
            fields.numbers("text_windows") if KEY_PREFIX + "text_windows" in keys else (),
        ),
        fields.text("transform"),
    )
    names, input_numbers = fields.texts("weights"), fields.numbers("inputs")
    if not names or len(names) != len(input_numbers) or len(set(names)) != len(names):
        raise _invalid(path, "its weights and their inputs do not match")
    tensors = {tensor.name: tensor for tensor in file_header.tensors}
    names_by_input: dict[int, list[str]] = {}
    for name, number in zip(names, input_numbers, strict=True):
        names_by_input.setdefault(number, []).append(name)
    if sorted(names_by_input) != list(range(len(names_by_input))):
        raise _invalid(path, "its inputs are not numbered from 0")
    mixed = fields.numbers("mixed") if MIXED_KEY in keys else ()
    inputs = tuple(
        replace(
            _stored_input(path, number, tuple(names_by_input[number]), tensors),
            mixed=number in mixed,
        )
        for number in range(len(names_by_input))
    )
    digest = fields.text("digest")
    if not digest or not digest.strip("0"):
        raise _invalid(path, "it was not finished")
    # This text is hashed, so it must never change, even when names in the code do.
    described = (
        f"About(model={origin.model!r}, chunk_size={origin.chunk_size!r}, chunks={origin.chunks!r},"
        f" texts={origin.texts!r}, datasets={origin.text.names!r}, transform={origin.transform!r})"
    )
    file_digest = hashlib.sha256(
        f"{digest} {described} {names} {input_numbers}".encode()
    ).hexdigest()[:32]
    return MomentsFile(
        path, file_digest, origin, inputs, dict(zip(names, input_numbers, strict=True))
    )


def _stored_input(
    path: Path, number: int, names: tuple[str, ...], tensors: Mapping[str, header.TensorInfo]
) -> StoredMoments:
    """Return the moments of input `number`, which the weights `names` share. Raises UserError if
    one of its tensors is missing, has the wrong shape, or contains invalid counts or squares.
    """
    import numpy as np

    moment_tensors = [
        tensors.get(f"{number}{suffix}")
        for suffix in (SECOND_SUFFIX, SQUARES_SUFFIX, FIRST_SUFFIX, COUNTS_SUFFIX)
    ]
    if not all(moment_tensors):
        raise _invalid(path, f"some of the moments of {names[0]} are missing")
    second, squares, first, counts = (tensor for tensor in moment_tensors if tensor)
    columns, matrices = squares.columns, counts.elements
    is_whole = second.columns == columns  # of an earlier version
    matrix_size = columns * columns if is_whole else triangle_size(columns)
    if (
        not 1 <= matrices <= MAX_MATRICES
        or {second.type, squares.type, first.type} != {"F32"}
        or counts.type != "F64"
        or second.elements != matrix_size * matrices
        or first.columns != columns
        or {squares.elements, first.elements} != {columns * matrices}
    ):
        raise _invalid(path, f"the moments of {names[0]} do not match")
    row_counts = np.fromfile(path, "<f8", matrices, offset=counts.offset)
    sums = np.fromfile(path, "<f4", columns * matrices, offset=squares.offset)
    if row_counts.size != matrices or not (np.isfinite(row_counts) & (row_counts >= 0)).all():
        raise _invalid(path, f"the counts of {names[0]} are invalid")
    if sums.size != columns * matrices or not (np.isfinite(sums) & (sums >= 0)).all():
        raise _invalid(path, f"{names[0]} contains values that are no sums of squares")
    entry = ImatrixEntry(path, squares.offset, squares.elements, tuple(row_counts.tolist()))
    return StoredMoments(
        path,
        names,
        columns,
        matrices,
        entry.divisors,
        second.offset,
        entry,
        first.offset,
        is_whole=is_whole,
    )


class _Fields:
    """The values of a file's `llmcli.moments.*` keys. Each method raises UserError if the key is
    missing or has another type.
    """

    def __init__(self, path: Path, keys: Mapping[str, header.MetadataField]) -> None:
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
        assert isinstance(value, header.GgufArray)
        if value.kind != kind:
            raise _invalid(
                self.path, f"its key {KEY_PREFIX}{name} is an array of {value.kind}, not of {kind}"
            )
        return list(value.read_values())

    def _of(self, name: str, kind: str) -> header.MetadataField:
        field = self.keys.get(KEY_PREFIX + name)
        if field is None or field.kind != kind:
            what = "is missing" if field is None else f"is {field.kind} instead of {kind}"
            raise _invalid(self.path, f"its key {KEY_PREFIX}{name} {what}")
        return field


def _invalid(path: Path, why: str) -> UserError:
    return UserError(f"{path} is no valid moments file: {why}", hint=REMAKE_HINT)
