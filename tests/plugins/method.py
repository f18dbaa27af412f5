"""A quantization method that uses the better one of ggml's and the search's codes for each row."""

from typing import TYPE_CHECKING

from quant.calibration.statistics import InputStatistics
from quant.methods.base import Method, RowEncoder
from quant.methods.ggml import Ggml
from quant.methods.search import Search
from quant.native import ggml

if TYPE_CHECKING:
    from quant.formats.base import BlockFormat
    from quant.native.ggml import F32, U8


class BestOfTwo(Method):
    """Encodes each row by both methods, and returns the blocks with the lower weighted error."""

    name, help, needs = "best-of-two", "the better of ggml and search for each row", "sums"

    def can_encode(self, format: "BlockFormat", statistics: InputStatistics) -> bool:
        """Return whether the search supports this format."""
        return Search().can_encode(format, statistics)

    def make_encoder(self, format: "BlockFormat", statistics: InputStatistics) -> RowEncoder:
        """Return a function that encodes rows of one tensor."""
        encoders = [method.make_encoder(format, statistics) for method in (Ggml(), Search())]
        read_importance = statistics.importance_reader()

        def encode_rows(rows: "F32", first: int) -> "U8":
            import numpy as np

            importance = read_importance(first, first + len(rows))
            weights = np.ones_like(rows)
            for begin, end, vector in importance.spans(0, len(rows)) if importance else ():
                weights[begin:end] = vector
            candidates = [encode(rows, first) for encode in encoders]
            errors = []
            for blocks in candidates:
                values = ggml.decode(blocks, format.name, rows.shape[1], label=statistics.name)
                errors.append((weights * (values - rows) ** 2).sum(axis=1))
            chosen: U8 = np.where((errors[0] < errors[1])[:, None], candidates[0], candidates[1])
            return chosen

        return encode_rows


METHODS = (BestOfTwo(),)
