"""The interface of quantization methods. A method turns the rows of one tensor into packed blocks,
guided by the statistics of the tensor's input.

A method returns blocks instead of rounded floats, because floats would have to be encoded again,
with a search that would choose other scales.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quant.calibration.statistics import InputStatistics

if TYPE_CHECKING:
    from quant.formats.base import BlockFormat
    from quant.native.ggml import F32, U8

# Arguments: rows [rows, columns], and the index of the first of these rows in the tensor. Returns
# blocks [rows, row_bytes].
RowEncoder = Callable[["F32", int], "U8"]


@dataclass(frozen=True, slots=True)
class MethodReport:
    """What a method did to one tensor.

    Of the `rows` that it encoded, `fallback_rows` got the codes of the fallback method, because
    their error was lower. `damping` is the damping of the second moments if it was higher than
    usual, else 0.
    """

    rows: int
    fallback_rows: int
    damping: float = 0.0


class Method(ABC):
    """A way to choose the codes of a tensor. Subclasses define `name`, `help` and `make_encoder`.

    `needs` says which statistics of the input the method uses: "nothing"; "sums", the mean squares
    of an imatrix, which are optional; or "moments", second moments. A tensor without second moments
    is quantized by the `fallback` method instead.
    """

    name: str
    help: str
    needs: Literal["nothing", "sums", "moments"] = "nothing"
    fallback: str = "ggml"

    def can_encode(self, format: "BlockFormat", statistics: InputStatistics) -> bool:
        """Return whether the method can encode a tensor with this format and these statistics. If
        not, the `fallback` method encodes it.
        """
        return statistics.moments is not None if self.needs == "moments" else True

    def values_per_chunk(self, statistics: InputStatistics) -> int:
        """Return how many values of a tensor the encoder should get in one call. 0 means the
        pipeline's default.
        """
        return 0

    def backend_name(self) -> str:
        """Return the name of the compute backend if the encoded bytes depend on it, else "". An
        interrupted file is not resumed with another backend.
        """
        return ""

    def slow_reason(self) -> str:
        """Return why the method works more slowly here than with our C code; "" if it does not."""
        return ""

    def report(self, encoder: RowEncoder) -> MethodReport | None:
        """Return the report on a tensor, given its encoder after the encoder has processed all
        rows. None if there is nothing to report.
        """
        return None

    def free_memory(self) -> None:  # noqa: B027 (most methods keep nothing)
        """Free what encoders have kept for later encoders."""

    @abstractmethod
    def make_encoder(self, format: "BlockFormat", statistics: InputStatistics) -> RowEncoder:
        """Return the encoder of one tensor's rows. It is made once for each tensor, and several
        threads call it at the same time.

        The same rows must give the same blocks, no matter how they are split into calls and which
        thread calls.
        """
