"""The interface of quantization methods: a method turns the rows of one tensor into packed blocks,
guided by the statistics of its input.

A method returns blocks and not rounded floats. Floats would have to be encoded again, with a search
that would choose other scales.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quant.calibration.statistics import InputStatistics

if TYPE_CHECKING:
    from quant.formats.base import BlockFormat
    from quant.native.ggml import F32, U8

# Arguments: rows [rows, columns], and the number of the first of them in the tensor. Returns blocks
# [rows, row_bytes].
RowEncoder = Callable[["F32", int], "U8"]


@dataclass(frozen=True, slots=True)
class MethodReport:
    """A method's report on one tensor.

    Of the `rows` that it encoded, `fallback_rows` got the codes of the fallback method, because
    their error was lower. `damping` is the damping of the second moments if it was higher than
    usual, else 0.
    """

    rows: int
    fallback_rows: int
    damping: float = 0.0


class Method(ABC):
    """A way to choose codes. Subclasses define `name`, `help` and `make_encoder`.

    `needs` says which statistics the method uses: "sums" are those of an imatrix, which are
    optional; "moments" are second moments, without which the `fallback` method quantizes the
    tensor.
    """

    name: str
    help: str
    needs: Literal["nothing", "sums", "moments"] = "nothing"
    fallback: str = "ggml"

    def can_encode(self, format: "BlockFormat", statistics: InputStatistics) -> bool:
        """Return whether the method can encode this format from these statistics. If not, the
        `fallback` method encodes it.
        """
        return statistics.moments is not None if self.needs == "moments" else True

    def values_per_chunk(self, statistics: InputStatistics) -> int:
        """Return how many values of a tensor to encode at a time; 0 means the pipeline's default."""
        return 0

    def backend_name(self) -> str:
        """Return the compute back end if the bytes depend on it, else "". An interrupted file is
        not resumed with another back end.
        """
        return ""

    def report(self, encoder: RowEncoder) -> MethodReport | None:
        """Return the report of a tensor once its encoder has processed all its rows."""
        return None

    @abstractmethod
    def make_encoder(self, format: "BlockFormat", statistics: InputStatistics) -> RowEncoder:
        """Return the encoder of one tensor's rows. It is made once per tensor, and several threads
        call it at a time.

        The same rows must give the same blocks, however they are split into calls and whichever
        thread calls.
        """
