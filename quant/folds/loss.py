"""The loss of a fold: the error that rounding causes in the outputs of the tensors that read the
site's channels. choose.py compares folds by it.

The loss of one such tensor is tr(dW H dW^T) over a sample of its rows. dW is the change that the
plan's method and type make in the folded weights, with the fold undone afterwards. H are the second
moments of the input, or a diagonal matrix if only its mean squares are known. The error of
llama.cpp's rounding of the inputs is added (activation_rounding.py).

Tensors that write the channels are not counted. A factor scales either a norm there, which stays
F32, or whole rows, and block formats follow the factor of a row closely.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.folds.fold import TensorEdit
from quant.folds.folded_source import read_rows
from quant.folds.folded_statistics import fold_statistics
from quant.formats import FORMATS, activation_rounding
from quant.methods import METHODS
from quant.native import ggml
from quant.quantize.plan import TensorPlan

if TYPE_CHECKING:
    from quant.folds.fold import Ints
    from quant.native.ggml import F32

# Number of rows that are sampled in a tensor, and of the matrices (experts) that they come from.
SAMPLE_ROWS, SAMPLE_MATRICES = 64, 4
# Second moments of wider tensors are not used: at this width they take 64 MiB.
MAX_MOMENT_COLUMNS = 4096
# In wider tensors a method that factors second moments is replaced by its fallback, because it
# would need a factorization for each candidate.
MAX_SOLVED_COLUMNS = 1024


@dataclass(frozen=True)
class RowSample:
    """Sampled rows of one matrix of a tensor, with the statistics of the matrix's input: mean
    `squares`, and second `moments` if they are known and not too large.
    """

    matrix: int
    rows: "F32"  # [rows, columns]
    squares: "F32"  # [columns]
    moments: "F32 | None"  # [columns, columns]

    def energy(self, changes: "F32") -> float:
        """Return the error in the outputs that `changes` [rows, columns] of the sampled rows cause:
        the sum of d H d^T over the rows d of `changes`.
        """
        import numpy as np

        if self.moments is None:
            return float(
                (np.square(changes, dtype=np.float64) @ self.squares.astype(np.float64)).sum()
            )
        return float(np.einsum("ij,ij->", changes @ self.moments, changes, dtype=np.float64))


class ReaderTensor:
    """A tensor that reads a site's channels. Its rows are sampled once, so that all folds are
    compared on the same rows.
    """

    def __init__(self, step: TensorPlan) -> None:
        self.step = step
        self.samples = tuple(_samples(step))

    @property
    def input_mean_squares(self) -> "F32":
        """Mean squares [matrices, columns] of the tensor's input."""
        statistics = self.step.statistics
        assert statistics.mean_squares is not None
        return statistics.mean_squares.mean_squares(0, statistics.matrices, statistics.columns)

    @property
    def weight_mean_squares(self) -> "F32":
        """Mean squares [matrices, columns] of the weights in each column, over sampled rows of each
        matrix.
        """
        import numpy as np

        return np.stack([np.square(rows).mean(0) for rows in self._sampled_rows()])

    @property
    def largest_weights(self) -> "F32":
        """Largest absolute weight [matrices, columns] in each column, over sampled rows of each
        matrix.
        """
        import numpy as np

        return np.stack([np.abs(rows).max(0) for rows in self._sampled_rows()])

    def _sampled_rows(self) -> "Iterator[F32]":
        """Yield sampled rows [rows, columns] of each matrix of the tensor."""
        statistics = self.step.statistics
        for matrix in range(statistics.matrices):
            yield _read_sample(self.step, matrix, max(16, 4 * SAMPLE_ROWS // statistics.matrices))

    def loss(self, edit: TensorEdit) -> float:
        """Return the error in the tensor's output when the tensor is folded by `edit` and then
        quantized: the error from rounding its weights plus that from rounding its inputs.
        """
        step, statistics = self.step, fold_statistics(self.step.statistics, edit)
        method = step.method
        assert method is not None
        if method.needs == "moments" and statistics.columns > MAX_SOLVED_COLUMNS:
            method = METHODS[method.fallback]
        encode, total = method.make_encoder(FORMATS[step.type], statistics), 0.0
        for sample in self.samples:
            factors = edit.matrix_factors(sample.matrix)
            order = edit.matrix_order(sample.matrix)
            folded = sample.rows if factors is None else sample.rows * factors
            folded = folded if order is None else folded[:, order]
            codes = encode(folded, sample.matrix * statistics.rows)
            rounded = ggml.decode(codes, step.type, statistics.columns, label=statistics.name)
            total += self._input_rounding_error(edit, sample, rounded)
            changes = rounded - folded
            if order is not None:
                changes = changes[:, _inverse(order)]
            total += sample.energy(changes if factors is None else changes / factors)
        return total

    def _input_rounding_error(self, edit: TensorEdit, sample: RowSample, rounded: "F32") -> float:
        """Return the error in the output that rounding the inputs adds, given the rounded weights
        [rows, columns] of a sample.
        """
        import numpy as np

        if not (size := activation_rounding.activation_block(self.step.type)):
            return 0.0
        variances = activation_rounding.rounding_variances(
            edit.fold_mean_squares(sample.squares, sample.matrix), size
        )
        return float((np.square(rounded, dtype=np.float64) @ variances.astype(np.float64)).sum())


def _read_sample(step: TensorPlan, matrix: int, max_rows: int) -> "F32":
    """Read up to `max_rows` evenly spaced rows of one matrix of a tensor. Return them as floats
    [rows, columns].
    """
    import numpy as np

    weight, height = step.weight, step.statistics.rows
    stored = read_rows(weight.read, np.array(_evenly_spaced(height, max_rows)) + matrix * height)
    return ggml.decode(stored, weight.type, weight.columns, label=weight.name)


def _samples(step: TensorPlan) -> "list[RowSample]":
    """Return SAMPLE_ROWS sampled rows in total, from up to SAMPLE_MATRICES matrices of a tensor, as
    one RowSample for each matrix.
    """
    weight, statistics = step.weight, step.statistics
    assert statistics.mean_squares is not None
    matrices = _evenly_spaced(statistics.matrices, SAMPLE_MATRICES)
    samples = []
    for matrix in matrices:
        floats = _read_sample(step, matrix, SAMPLE_ROWS // len(matrices))
        squares = statistics.mean_squares.mean_squares(matrix, matrix + 1, weight.columns)[0]
        fits = statistics.moments is not None and weight.columns <= MAX_MOMENT_COLUMNS
        moments = (
            statistics.moments.mean(matrix) if statistics.moments is not None and fits else None
        )
        samples.append(RowSample(matrix, floats, squares, moments))
    return samples


def _evenly_spaced(count: int, max_count: int) -> Sequence[int]:
    """Return `max_count` evenly spaced numbers below `count`, or all numbers if there are fewer."""
    return [step * count // min(count, max_count) for step in range(min(count, max_count))]


def _inverse(order: "Ints") -> "Ints":
    """Return the inverse of a permutation."""
    import numpy as np

    inverse: Ints = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse
