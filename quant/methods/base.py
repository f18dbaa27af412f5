"""Quantization methods: from the rows of one tensor and the statistics of its input to packed
blocks.

A method returns blocks and not floats to be encoded again, because another search would choose
another grid.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quant.calibration.statistics import InputStatistics

if TYPE_CHECKING:
    from quant.formats.base import BlockFormat
    from quant.native.ggml import F32, U8

# Rows [rows, columns] and the number of the first of them in the tensor -> blocks [rows,
# row_bytes].
RowEncoder = Callable[["F32", int], "U8"]


@dataclass(frozen=True, slots=True)
class MethodReport:
    """What a method reports about one tensor.

    Of its `rows`, `fallback_rows` got the codes of the fallback method, whose error was lower.
    `damping` is the damping of its second moments if that was more than usual, else 0.
    """

    rows: int
    fallback_rows: int
    damping: float = 0.0


class Method(ABC):
    """A way to choose codes. Subclasses define `name`, `help` and `make_encoder`.

    `needs` is the statistic that the method uses: "sums" is an imatrix, which is optional;
    "moments" are second moments, without which the `fallback` method quantizes the tensor.
    """

    name: str
    help: str
    needs: Literal["nothing", "sums", "moments"] = "nothing"
    fallback: str = "ggml"

    def can_encode(self, format: "BlockFormat", statistics: InputStatistics) -> bool:
        """Return whether the method can encode this format from these statistics; if not,
        `fallback` does.
        """
        return statistics.moments is not None if self.needs == "moments" else True

    def values_per_chunk(self, statistics: InputStatistics) -> int:
        """Return how many values of a tensor to encode at a time; 0 leaves the choice to the
        pipeline.
        """
        return 0

    def backend_name(self) -> str:
        """Return the compute back end if it affects the bytes: an interrupted file is not resumed
        with another one.
        """
        return ""

    def report(self, encoder: RowEncoder) -> MethodReport | None:
        """Return the report of a tensor once its encoder has processed all its rows."""
        return None

    @abstractmethod
    def make_encoder(self, format: "BlockFormat", statistics: InputStatistics) -> RowEncoder:
        """Return the encoder of one tensor's rows. It is created once per tensor and called from
        several threads at a time.

        The same rows must give the same blocks, however they are split and whichever thread calls.
        """
