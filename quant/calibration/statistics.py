"""The calibration statistics that a method gets: SecondMoments and InputStatistics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quant.calibration.imatrix import ImatrixEntry
from quant.native import ggml

if TYPE_CHECKING:
    from quant.native.ggml import F32


class SecondMoments(Protocol):
    """The second moments of one tensor's input (quant/calibration/moments.py)."""

    @property
    def columns(self) -> int: ...
    @property
    def matrices(self) -> int: ...
    @property
    def mixed(self) -> bool: ...
    def mean(self, matrix: int = 0) -> "F32":
        """Return the mean of x x^T [columns, columns]."""
        ...

    def squares(self, matrix: int = 0) -> "F32":
        """Return the mean of x^2 [columns], the diagonal of mean()."""
        ...


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """The calibration statistics of one tensor's input. The tensor has `matrices` (experts) of
    `rows` rows each, one after another.

    `mean_squares` are an imatrix's mean squares of the columns, `moments` the second moments; each
    is None if it was not measured. In a weight that computes queries, keys and values together, the
    last `value_rows` rows compute the values.
    """

    name: str
    columns: int
    rows: int
    matrices: int = 1
    mean_squares: ImatrixEntry | None = None
    moments: SecondMoments | None = None
    value_rows: int = 0

    def importance(self, first: int, last: int) -> ggml.Importance | None:
        """Return the importance of rows first .. last, or None if there are no mean squares."""
        return (
            self.mean_squares.importance(first, last, self.rows, self.columns)
            if self.mean_squares
            else None
        )

    def importance_reader(self) -> Callable[[int, int], ggml.Importance | None]:
        """Return a function like importance() for repeated calls: it reads the mean squares of a
        tensor with a single matrix only once.
        """
        if self.matrices > 1 or (only := self.importance(0, self.rows)) is None:
            return self.importance
        return lambda first, last: only.after(first)
