"""What a fold costs or gains: the error that rounding leaves in the output of each tensor that
reads its channels.

The loss of a reader is tr(dW H dW^T) over a sample of its rows, dW being what its own method and
type change in the folded weights, seen through the fold; with mean squares alone H is diagonal. To
it comes what llama.cpp's rounding of the inputs adds (rounding.py). Whoever writes the channels is
not asked: a factor there scales a norm that stays F32, or whole rows, and block formats follow a
row's factor (rows times 1/8 to 8, ggml with an imatrix: the relative error changes by 0.02 % at
most, by 0.4 % in Q6_K). It knows one plan's steps, no candidates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quant import native, rounding
from quant.folds.fold import Edit
from quant.folds.follow import followed
from quant.folds.rewrite import gathered
from quant.formats import FORMATS
from quant.methods import METHODS
from quant.planning import Step

if TYPE_CHECKING:
    from quant.folds.fold import Ints
    from quant.native import F32

ROWS, MATRICES = 64, 4  # sampled of a tensor: rows in all, and experts they are from
SECONDS = 4096  # columns up to which second moments are used: 64 MiB of them
# columns up to which a method that needs them is asked itself: it factorises them for each
# candidate
SOLVED = 1024


@dataclass(frozen=True)
class Sample:
    """Rows of one matrix of a tensor, and what is known of its input."""

    matrix: int
    rows: "F32"  # [rows, columns]
    squares: "F32"  # [columns]
    second: "F32 | None"  # [columns, columns]

    def energy(self, changes: "F32") -> float:
        """Sum of d H d^T over rows of changes [rows, columns]."""
        import numpy as np

        if self.second is None:
            return float(
                (np.square(changes, dtype=np.float64) @ self.squares.astype(np.float64)).sum()
            )
        return float(np.einsum("ij,ij->", changes @ self.second, changes, dtype=np.float64))


class Reader:
    """A tensor that reads a site's channels, sampled once for all candidates."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.samples = tuple(_samples(step))

    @property
    def squares(self) -> "F32":
        """Mean squares [matrices, columns] of the input."""
        evidence = self.step.evidence
        assert evidence.sums is not None
        return evidence.sums.vectors(0, evidence.matrices, evidence.columns)

    @property
    def weights(self) -> "F32":
        """Mean squares [matrices, columns] of the tensor's own values, of some rows of each matrix."""
        import numpy as np

        return np.stack([np.square(rows).mean(0) for rows in self._statistics()])

    @property
    def largest(self) -> "F32":
        """The largest value [matrices, columns] of some rows of each matrix, without its sign."""
        import numpy as np

        return np.stack([np.abs(rows).max(0) for rows in self._statistics()])

    def _statistics(self) -> "Iterator[F32]":
        evidence = self.step.evidence
        for matrix in range(evidence.matrices):
            yield _rows(self.step, matrix, max(16, 4 * ROWS // evidence.matrices))

    def loss(self, edit: Edit) -> float:
        """The error in the tensor's output under a fold: rounded weights, and rounded inputs."""
        step, evidence = self.step, followed(self.step.evidence, edit)
        method = step.method
        assert method is not None
        if method.needs == "moments" and evidence.columns > SOLVED:
            method = METHODS[method.instead]
        solve, total = method.solver(FORMATS[step.type], evidence), 0.0
        for sample in self.samples:
            columns = _vector(edit.columns, sample.matrix)
            order = _vector(edit.column_order, sample.matrix)
            folded = sample.rows if columns is None else sample.rows * columns
            folded = folded if order is None else folded[:, order]
            codes = solve(folded, sample.matrix * evidence.rows)
            made = native.decode(codes, step.type, evidence.columns, label=evidence.name)
            total += self._inputs(edit, sample, made)
            changes = made - folded
            if order is not None:
                changes = changes[:, _inverse(order)]
            total += sample.energy(changes if columns is None else changes / columns)
        return total

    def _inputs(self, edit: Edit, sample: Sample, made: "F32") -> float:
        """What rounding the inputs adds, for the weights as they were made."""
        import numpy as np

        if not (size := rounding.block(self.step.type)):
            return 0.0
        variances = rounding.variances(edit.squares(sample.squares, sample.matrix), size)
        return float((np.square(made, dtype=np.float64) @ variances.astype(np.float64)).sum())


def _rows(step: Step, matrix: int, most: int) -> "F32":
    """Rows [rows, columns] of a matrix, evenly spaced."""
    import numpy as np

    weight, height = step.weight, step.evidence.rows
    stored = gathered(weight.read, np.array(_spread(height, most)) + matrix * height)
    return native.decode(stored, weight.type, weight.columns, label=weight.name)


def _samples(step: Step) -> "list[Sample]":
    weight, evidence = step.weight, step.evidence
    assert evidence.sums is not None
    matrices = _spread(evidence.matrices, MATRICES)
    found = []
    for matrix in matrices:
        floats = _rows(step, matrix, ROWS // len(matrices))
        squares = evidence.sums.vectors(matrix, matrix + 1, weight.columns)[0]
        use = evidence.second is not None and weight.columns <= SECONDS
        second = evidence.second.mean(matrix) if evidence.second is not None and use else None
        found.append(Sample(matrix, floats, squares, second))
    return found


def _spread(count: int, most: int) -> Sequence[int]:
    """Up to `most` of so many, evenly spaced."""
    return [place * count // min(count, most) for place in range(min(count, most))]


def _vector(vectors: Any, matrix: int) -> Any:
    return None if vectors is None else vectors[matrix if len(vectors) > 1 else 0]


def _inverse(order: "Ints") -> "Ints":
    import numpy as np

    found: Ints = np.empty_like(order)
    found[order] = np.arange(len(order))
    return found
