"""Log-sum-exp of a row of logits, for log-probabilities, and the maxima of its strands.

llmcli's own C (row.c) scans a row once for both. Without it, libggml-cpu's vectorized softmax is
used; it is exported without being public, so numpy computes the sum where that name is missing. All
give equal results within rounding.
"""

import ctypes
import functools
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.kernels import row_scan

# the function of ggml/src/ggml-cpu/vec.cpp that returns the sum and writes the exponentials to y
SOFTMAX_SYMBOL = "ggml_vec_soft_max_f32"
MIN_SUM = 1e-30  # below this, the exponentials in the sum have lost their digits
LIBRARY_NAMES = {"linux": ("libggml-cpu.so",), "darwin": ("libggml-cpu.dylib", "libggml-cpu.so")}


# Rows are summed in pieces of this many logits, so that the exponentials stay in the nearest CPU
# caches.
PIECE_LOGITS = 16384


class LogSumExp:
    """Log-sum-exp over rows of logits, float32 `[n_vocab]` each; owns small buffers."""

    def __init__(self) -> None:
        self._buffer = np.empty(PIECE_LOGITS, np.float32)
        self._address = self._buffer.ctypes.data
        self._own, self._native = row_scan.load_row_scan(), _native()

    def __call__(self, logits: NDArray[np.float32], address: int, near: float) -> float:
        """Return the log of the sum of exp(logits). `address`: the address of the logits, which are
        not changed.

        `near`: a number that is subtracted before exponentials are taken, best a logit within 80 of
        the largest one. This saves the search for the maximum. If `near` is further away, the
        maximum is searched and used.

        Shapes: logits `[n_vocab]`.
        """
        total = self._sum(logits, address, near) if math.isfinite(near) else math.inf
        return self._log(logits, address, near, total)

    def with_maxima(
        self, logits: NDArray[np.float32], address: int, near: float, maxima: row_scan.RowMaxima
    ) -> float:
        """Return the log-sum-exp like `__call__`. If llmcli's C code is available, the same scan
        also fills in `maxima`.
        """
        if self._own is None or not math.isfinite(near):
            return self(logits, address, near)
        total = self._own.sum_exp(address, len(logits), near, maxima.buffer_address(len(logits)))
        if not math.isnan(total):
            maxima.mark_filled()
        return self._log(logits, address, near, total)

    def _log(self, logits: NDArray[np.float32], address: int, near: float, total: float) -> float:
        """Return the logarithm of the sum `total`. The sum is computed again if `near` was too far
        from the maximum.
        """
        if not math.isfinite(total) or total < MIN_SUM:
            near = float(logits.max())
            total = self._sum(logits, address, near)
        return near + math.log(total)

    def _sum(self, logits: NDArray[np.float32], address: int, near: float) -> float:
        native, count = self._native, len(logits)
        if self._own is not None:
            return float(self._own.sum_exp(address, count, near, None))
        if native is None:
            return sum(
                self._plain(logits[at : at + PIECE_LOGITS], near)
                for at in range(0, count, PIECE_LOGITS)
            )
        total = 0.0
        for at in range(0, count, PIECE_LOGITS):
            total += native(min(PIECE_LOGITS, count - at), self._address, address + 4 * at, near)
        return total

    def _plain(self, piece: NDArray[np.float32], near: float) -> float:
        buffer = self._buffer[: len(piece)]
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(piece, np.float32(near), out=buffer)
            np.exp(buffer, out=buffer)
        return float(buffer.sum(dtype=np.float64))


@functools.cache
def _native() -> Any | None:
    spec = find_spec("llama_cpp")
    assert spec and spec.origin
    for name in LIBRARY_NAMES.get(sys.platform, ()):
        path = Path(spec.origin).parent / "lib" / name
        if path.exists() and (function := getattr(ctypes.CDLL(str(path)), SOFTMAX_SYMBOL, None)):
            function.restype = ctypes.c_double
            function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float]
            return function
    return None
