"""`--method ggml`, the default: libggml's own search, byte for byte what llama-quantize writes."""

from typing import TYPE_CHECKING

from quant import native
from quant.methods.base import Evidence, Method, Solver

if TYPE_CHECKING:
    from quant.formats.base import Format
    from quant.native import F32, U8


class Ggml(Method):
    """Every type, with an imatrix or without."""

    name, help = "ggml", "llama.cpp's own search, byte for byte"

    def solver(self, format: "Format", evidence: Evidence) -> Solver:
        """libggml's encoder for the format."""

        weigh = evidence.weigher()

        def solve(rows: "F32", first: int) -> "U8":
            importance = weigh(first, first + len(rows))
            return native.encode(rows, format.name, label=evidence.name, importance=importance)

        return solve


METHODS = (Ggml(),)
