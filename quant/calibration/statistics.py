"""The calibration statistics of a tensor's input, as a quantization method receives them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quant.calibration.imatrix import ImatrixEntry
from quant.native import ggml

if TYPE_CHECKING:
    from quant.native.ggml import F32


class SecondMoments(Protocol):
    """The second moments of one tensor's input (quant/calibration/moments.py). `matrices` is the
    number of matrices (experts) in the tensor. `mixed` means that the moments are those of
    attention's mixtures of the input rows (quant/calibration/attention_moments.py).
    """

    @property
    def columns(self) -> int: ...
    @property
    def matrices(self) -> int: ...
    @property
    def mixed(self) -> bool: ...
    def mean(self, matrix: int = 0) -> "F32":
        """Return the mean of x x^T over the input rows x of one matrix, `[columns, columns]`."""
        ...

    def squares(self, matrix: int = 0) -> "F32":
        """Return the mean of x^2 over the input rows x of one matrix, `[columns]`: the diagonal of
        mean().
        """
        ...


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """The calibration statistics of one tensor's input. The tensor consists of `matrices` matrices
    (experts) of `rows` rows each, one after another.

    `mean_squares` are the imatrix's mean squares of the columns, and `moments` are the second
    moments; each is None if it was not collected. `value_rows` is for a weight that computes
    queries, keys and values together: its last `value_rows` rows compute the values. It is 0 for
    all other weights.
    """

    name: str
    columns: int
    rows: int
    matrices: int = 1
    mean_squares: ImatrixEntry | None = None
    moments: SecondMoments | None = None
    value_rows: int = 0

    def importance(self, first: int, last: int) -> ggml.Importance | None:
        """Return the importance of the columns for rows first .. last of the tensor, or None if
        there are no mean squares.
        """
        return (
            self.mean_squares.importance(first, last, self.rows, self.columns)
            if self.mean_squares
            else None
        )

    def importance_reader(self) -> Callable[[int, int], ggml.Importance | None]:
        """Return a function that gives the same results as importance(), for repeated calls. If the
        tensor has a single matrix, the mean squares are read from the file only once.
        """
        if self.matrices > 1 or (only := self.importance(0, self.rows)) is None:
            return self.importance
        return lambda first, last: only.after(first)
