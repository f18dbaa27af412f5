"""Calibration statistics after a fold: the measured values divided and reordered as the input is.
The result is exact, so that nothing has to be measured again.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quant.calibration.imatrix import Entry
from quant.calibration.statistics import Evidence, Second
from quant.folds.fold import Edit

if TYPE_CHECKING:
    from quant.native.ggml import F32


@dataclass(frozen=True)
class FoldedSums(Entry):
    """The mean squares of a folded tensor's input."""

    edit: Edit = field(kw_only=True, repr=False)

    def vectors(self, first: int, last: int, columns: int) -> "F32":
        """Return the mean squares [last - first, columns] of matrices first .. last, after the
        folds.
        """
        import numpy as np

        means = Entry.vectors(self, first, last, columns)
        return np.stack(
            [self.edit.squares(row, first + at) for at, row in enumerate(means)]
        ).astype(np.float32)


@dataclass(frozen=True)
class FoldedSecond:
    """The second moments of a folded tensor's input."""

    second: Second
    edit: Edit

    @property
    def columns(self) -> int:
        return self.second.columns

    @property
    def matrices(self) -> int:
        return self.second.matrices

    @property
    def mixed(self) -> bool:
        return self.second.mixed

    def mean(self, matrix: int = 0) -> "F32":
        """Return S^-1 H S^-1 [columns, columns], reordered alike."""
        return self.edit.second(self.second.mean(matrix), matrix)

    def squares(self, matrix: int = 0) -> "F32":
        """Return the diagonal [columns] of mean()."""
        return self.edit.squares(self.second.squares(matrix), matrix)


def followed(evidence: Evidence, edit: Edit | None) -> Evidence:
    """Return the statistics of a tensor's input after its edit."""
    if edit is None or (edit.columns is None and edit.column_order is None):
        return evidence
    sums, second = evidence.sums, evidence.second
    if sums is not None:
        sums = FoldedSums(sums.file, sums.offset, sums.count, sums.divisors, edit=edit)
    return replace(
        evidence, sums=sums, second=None if second is None else FoldedSecond(second, edit)
    )
