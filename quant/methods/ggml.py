"""`--method ggml`, the default: libggml's own choice of scales and codes. It writes the same bytes
as llama-quantize.
"""

from typing import TYPE_CHECKING

from quant.calibration.statistics import InputStatistics
from quant.methods.base import Method, RowEncoder
from quant.native import ggml

if TYPE_CHECKING:
    from quant.formats.base import BlockFormat
    from quant.native.ggml import F32, U8


class Ggml(Method):
    """ggml's own encoder. It supports every type, with or without an imatrix."""

    name, help = "ggml", "llama.cpp's own search, with identical bytes"

    def make_encoder(self, format: "BlockFormat", statistics: InputStatistics) -> RowEncoder:
        """Return libggml's encoder for the format. It weighs columns by the imatrix if there is
        one.
        """

        read_importance = statistics.importance_reader()

        def encode(rows: "F32", first: int) -> "U8":
            importance = read_importance(first, first + len(rows))
            return ggml.encode(rows, format.name, label=statistics.name, importance=importance)

        return encode


METHODS = (Ggml(),)
