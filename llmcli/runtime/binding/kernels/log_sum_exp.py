"""The log-sum-exp of a row of logits, for log-probabilities. The same scan can find the maxima of
the row's strands (row.c), which speed up the search for the likeliest tokens.

llmcli's C code (row.c) computes both in one scan. An installation without it uses the vectorized
softmax of libggml-cpu, a function that is exported although it is not public. Where that is missing
too, numpy computes the sum. All three give equal results within rounding.
"""

import ctypes
import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding import contract
from llmcli.runtime.binding.kernels import ggml_cpu, row_scan

MIN_SUM = 1e-30  # below this, the exponentials in the sum have lost their digits
# Rows are summed in pieces of this many logits, so that the exponentials stay in the nearest CPU
# caches.
PIECE_LOGITS = 16384


class LogSumExp:
    """Computes the log-sum-exp of rows of logits, float32 `[n_vocab]` each, with the fastest
    available code. It owns a small buffer for exponentials.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(PIECE_LOGITS, np.float32)
        self._address = self._buffer.ctypes.data
        self._row_scan, self._native = row_scan.load_row_scan(), _native()

    def __call__(self, logits: NDArray[np.float32], address: int, near: float) -> float:
        """Return the log of the sum of exp(logits). `address`: the memory address of `logits`,
        which are not changed.

        `near`: a number that is subtracted before exponentials are taken, best a logit within 80 of
        the largest one. A good value saves the search for the maximum. If `near` is further away,
        the maximum is searched and used instead.

        Shapes: logits `[n_vocab]`.
        """
        total = self._sum(logits, address, near) if math.isfinite(near) else math.inf
        return self.from_sum(logits, address, near, total)

    def with_maxima(
        self, logits: NDArray[np.float32], address: int, near: float, maxima: row_scan.RowMaxima
    ) -> float:
        """Return the log-sum-exp like `__call__`. If llmcli's C code is available, the same scan
        also fills in `maxima`.
        """
        if self._row_scan is None or not math.isfinite(near):
            return self(logits, address, near)
        total = self._row_scan.sum_exp(
            address, len(logits), near, maxima.buffer_address(len(logits))
        )
        if not math.isnan(total):
            maxima.mark_filled()
        return self.from_sum(logits, address, near, total)

    def from_sum(
        self, logits: NDArray[np.float32], address: int, near: float, total: float
    ) -> float:
        """Return the log-sum-exp from `total`, the sum of exp(logits - near). If `near` was too far
        from the maximum for an exact sum, the sum is first computed again from the maximum.
        """
        if not math.isfinite(total) or total < MIN_SUM:
            near = float(logits.max())
            total = self._sum(logits, address, near)
        return near + math.log(total)

    def _sum(self, logits: NDArray[np.float32], address: int, near: float) -> float:
        """Return the sum of exp(logits - near)."""
        native, count = self._native, len(logits)
        if self._row_scan is not None:
            return float(self._row_scan.sum_exp(address, count, near, None))
        if native is None:
            return sum(
                self._numpy_sum(logits[at : at + PIECE_LOGITS], near)
                for at in range(0, count, PIECE_LOGITS)
            )
        total = 0.0
        for at in range(0, count, PIECE_LOGITS):
            total += native(min(PIECE_LOGITS, count - at), self._address, address + 4 * at, near)
        return total

    def _numpy_sum(self, piece: NDArray[np.float32], near: float) -> float:
        """Return the sum of exp(piece - near), computed by numpy."""
        buffer = self._buffer[: len(piece)]
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(piece, np.float32(near), out=buffer)
            np.exp(buffer, out=buffer)
        return float(buffer.sum(dtype=np.float64))


@functools.cache
def _native() -> Any | None:
    """Return the softmax function of libggml-cpu (ggml/src/ggml-cpu/vec.cpp), or None if it is not
    exported. It returns the sum, and writes the exponentials to its second argument.
    """
    library = ggml_cpu.load_ggml_cpu()
    function = contract.optional_function(library, contract.SOFT_MAX) if library else None
    if function:
        function.restype = ctypes.c_double
        function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float]
    return function
