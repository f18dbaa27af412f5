"""Calibration statistics after a fold: the measured values, divided and reordered like the input.
The result is exact, so nothing has to be measured again.
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
    """The mean squares of a folded tensor's input."""

    edit: TensorEdit = field(kw_only=True, repr=False)

    def mean_squares(self, first: int, last: int, columns: int) -> "F32":
        """Return the mean squares [last - first, columns] of matrices first .. last, after the
        folds.
        """
        import numpy as np

        means = ImatrixEntry.mean_squares(self, first, last, columns)
        return np.stack(
            [self.edit.fold_mean_squares(row, first + at) for at, row in enumerate(means)]
        ).astype(np.float32)


@dataclass(frozen=True)
class FoldedMoments:
    """The second moments of a folded tensor's input."""

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
        """Return S^-1 H S^-1 [columns, columns], with rows and columns reordered like the input."""
        return self.edit.fold_moments(self.moments.mean(matrix), matrix)

    def squares(self, matrix: int = 0) -> "F32":
        """Return the diagonal [columns] of mean()."""
        return self.edit.fold_mean_squares(self.moments.squares(matrix), matrix)


def fold_statistics(evidence: InputStatistics, edit: TensorEdit | None) -> InputStatistics:
    """Return the statistics of a tensor's input after the tensor's edit."""
    if edit is None or (edit.column_factors is None and edit.column_order is None):
        return evidence
    sums, second = evidence.mean_squares, evidence.moments
    if sums is not None:
        sums = FoldedMeanSquares(sums.file, sums.offset, sums.count, sums.divisors, edit=edit)
    return replace(
        evidence, mean_squares=sums, moments=None if second is None else FoldedMoments(second, edit)
    )
