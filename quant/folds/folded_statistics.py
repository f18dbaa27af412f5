"""Calibration statistics of a folded tensor's input. They are computed from the measured
statistics: divided by the fold's factors and reordered like the input. The result is exact, so no
text has to be run again.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quant.calibration.imatrix import ImatrixEntry
from quant.calibration.statistics import InputStatistics, SecondMoments
from quant.folds.fold import TensorEdit

if TYPE_CHECKING:
    from quant.native.ggml import F32


@dataclass(frozen=True)
class FoldedMeanSquares(ImatrixEntry):
    """The mean squares of a folded tensor's input, computed from the imatrix entry of the unfolded
    tensor when they are read.
    """

    edit: TensorEdit = field(kw_only=True, repr=False)

    def mean_squares(self, first: int, last: int, columns: int) -> "F32":
        """Return the mean squares [last - first, columns] of the inputs of matrices first .. last
        after the folds.
        """
        import numpy as np

        means = ImatrixEntry.mean_squares(self, first, last, columns)
        return np.stack(
            [self.edit.fold_mean_squares(row, first + at) for at, row in enumerate(means)]
        ).astype(np.float32)


@dataclass(frozen=True)
class FoldedMoments:
    """The second moments of a folded tensor's input, computed from the `moments` of the unfolded
    tensor when they are read.
    """

    moments: SecondMoments
    edit: TensorEdit

    @property
    def columns(self) -> int:
        return self.moments.columns

    @property
    def matrices(self) -> int:
        return self.moments.matrices

    @property
    def mixed(self) -> bool:
        return self.moments.mixed

    def mean(self, matrix: int = 0) -> "F32":
        """Return the mean second moments [columns, columns] of a matrix's folded input: S^-1 H
        S^-1, with rows and columns reordered like the input.
        """
        return self.edit.fold_moments(self.moments.mean(matrix), matrix)

    def squares(self, matrix: int = 0) -> "F32":
        """Return the mean squares [columns] of a matrix's folded input, the diagonal of mean()."""
        return self.edit.fold_mean_squares(self.moments.squares(matrix), matrix)


def fold_statistics(statistics: InputStatistics, edit: TensorEdit | None) -> InputStatistics:
    """Return the statistics of a tensor's input after the tensor is edited. `edit` None, or an edit
    of rows only, leaves the statistics unchanged.
    """
    if edit is None or (edit.column_factors is None and edit.column_order is None):
        return statistics
    mean_squares, moments = statistics.mean_squares, statistics.moments
    if mean_squares is not None:
        mean_squares = FoldedMeanSquares(
            mean_squares.file,
            mean_squares.offset,
            mean_squares.count,
            mean_squares.divisors,
            edit=edit,
        )
    return replace(
        statistics,
        mean_squares=mean_squares,
        moments=None if moments is None else FoldedMoments(moments, edit),
    )
