"""`--method ggml`, the default: libggml's own search, which writes the same bytes as
llama-quantize.
"""

from typing import TYPE_CHECKING

from quant.calibration.statistics import Evidence
from quant.methods.base import Method, Solver
from quant.native import ggml

if TYPE_CHECKING:
    from quant.formats.base import Format
    from quant.native.ggml import F32, U8


class Ggml(Method):
    """Every type, with or without an imatrix."""

    name, help = "ggml", "llama.cpp's own search, with identical bytes"

    def solver(self, format: "Format", evidence: Evidence) -> Solver:
        """Return libggml's encoder for the format."""

        weigh = evidence.weigher()

        def solve(rows: "F32", first: int) -> "U8":
            importance = weigh(first, first + len(rows))
            return ggml.encode(rows, format.name, label=evidence.name, importance=importance)

        return solve


METHODS = (Ggml(),)
