"""What a method is: from the rows of one tensor, and what is known of its inputs, to packed blocks.

A method returns blocks, never floats that would be encoded again: another search would choose
another grid. It knows one tensor at a time, no files and no plans.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from quant import native
from quant.imatrix import Entry

if TYPE_CHECKING:
    from quant.formats.base import Format
    from quant.native import F32, U8

# Rows [rows, columns] and the number of the first of them in the tensor -> their blocks [rows,
# row_bytes].
Solver = Callable[["F32", int], "U8"]


@dataclass(frozen=True, slots=True)
class Remark:
    """What came out while a tensor was solved: of its `rows` those in `others` have the codes of
    the method named by `instead`, whose error was lower; `damping` is what its moments took where
    that was more than usual, else 0.
    """

    rows: int
    others: int
    damping: float = 0.0


class Second(Protocol):
    """The second moments of one tensor's input (quant/moments.py)."""

    @property
    def columns(self) -> int: ...
    @property
    def matrices(self) -> int: ...
    @property
    def mixed(self) -> bool: ...
    def mean(self, matrix: int = 0) -> "F32": ...
    def squares(self, matrix: int = 0) -> "F32": ...


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one tensor's input: `matrices` of `rows` rows each lie one after another
    (experts).

    `sums` are an imatrix's mean squares of the columns, `second` their second moments; None where
    nobody measured. Of a weight that puts out queries, keys and values the last rows, `values` of
    them, are for the latter.
    """

    name: str
    columns: int
    rows: int
    matrices: int = 1
    sums: Entry | None = None
    second: Second | None = None
    values: int = 0

    def weigh(self, first: int, last: int) -> native.Importance | None:
        """What the imatrix says of the rows first .. last, None where it is silent."""
        return self.sums.over(first, last, self.rows, self.columns) if self.sums else None

    def weigher(self) -> Callable[[int, int], native.Importance | None]:
        """weigh() for one who asks often: the vector of a tensor with one matrix is read once."""
        if self.matrices > 1 or (only := self.weigh(0, self.rows)) is None:
            return self.weigh
        return lambda first, last: only.behind(first)


class Method(ABC):
    """A way to choose codes. A leaf gives `name`, `help` and `solver`.

    `needs` says what a tensor must have been measured for: "sums" are an imatrix, welcome to most
    and needed by none; "moments" are second moments, without which a tensor goes to the method
    named by `instead`.
    """

    name: str
    help: str
    needs: Literal["nothing", "sums", "moments"] = "nothing"
    instead: str = "ggml"

    def handles(self, format: "Format", evidence: Evidence) -> bool:
        """Whether it makes such blocks from what is known; if not, `instead` does."""
        return evidence.second is not None if self.needs == "moments" else True

    def values(self, evidence: Evidence) -> int:
        """How many values of a tensor it would have at a time; 0 leaves that to the pipeline."""
        return 0

    def means(self) -> str:
        """What it computes with, where that shows in the bytes: a draft made by other means is not
        gone on with.
        """
        return ""

    def remark(self, solver: Solver) -> Remark | None:
        """What there is to say of a tensor once `solver` has solved all that was asked of it."""
        return None

    @abstractmethod
    def solver(self, format: "Format", evidence: Evidence) -> Solver:
        """What encodes the rows of one tensor; made once a tensor, then called by several threads
        at a time.

        The same rows give the same blocks however they are cut and whoever calls.
        """
