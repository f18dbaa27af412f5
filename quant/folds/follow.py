"""What was measured of a tensor's input, as it is after folds: the same numbers, divided and
ordered as the input is.

Follows exactly: nothing has to be measured again. It knows evidence and edits, no plans.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quant.folds.fold import Edit
from quant.imatrix import Entry
from quant.methods.base import Evidence, Second

if TYPE_CHECKING:
    from quant.native import F32


@dataclass(frozen=True)
class FoldedSums(Entry):
    """An imatrix's sums of a folded tensor."""

    edit: Edit = field(kw_only=True, repr=False)

    def vectors(self, first: int, last: int, columns: int) -> "F32":
        """As Entry's, after the folds."""
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
        """S^-1 H S^-1, ordered alike."""
        return self.edit.second(self.second.mean(matrix), matrix)

    def squares(self, matrix: int = 0) -> "F32":
        """Its diagonal."""
        return self.edit.squares(self.second.squares(matrix), matrix)


def followed(evidence: Evidence, edit: Edit | None) -> Evidence:
    """What is known of a tensor's input after its edit."""
    if edit is None or (edit.columns is None and edit.column_order is None):
        return evidence
    sums, second = evidence.sums, evidence.second
    if sums is not None:
        sums = FoldedSums(sums.file, sums.offset, sums.count, sums.divisors, edit=edit)
    return replace(
        evidence, sums=sums, second=None if second is None else FoldedSecond(second, edit)
    )
