"""The sum of exponentials over a row of logits, for log-probabilities, and with it the largest of
its strands.

Our own C (row.c) looks at a row once for both. Where the build has none of it: libggml-cpu's own
vectorised softmax takes 45 µs for 49,152 logits where numpy takes 100 (two-core AVX2, 2026-11); it
is exported without being public, so numpy does it where that name is missing, too. Tested equal.

2026-11-22: 262,144 logits in a loop of their own take ggml 113 µs, and numpy's columns 28 behind
them (92 to 104 and 150 behind a forward pass); ours takes 62 for both, 51 for the sum alone
(two-core Xeon with AVX-512). Fetching the row is what is left: with 256 MB read in between the
largest of its strands alone take 51, and 16 in a loop of their own.
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

from llmcli.runtime.binding import look

SYMBOL = "ggml_vec_soft_max_f32"  # ggml/src/ggml-cpu/vec.cpp: returns the sum, fills y
TINY = 1e-30  # below this the exponentials have lost their digits
NAMES = {"linux": ("libggml-cpu.so",), "darwin": ("libggml-cpu.dylib", "libggml-cpu.so")}


# Rows are summed in pieces of this many logits: the exponentials stay in the nearest caches, where
# a whole row's would have to be fetched anew after every forward pass (130 -> 70 µs in place, same
# machine).
PIECE = 16384


class LogSumExp:
    """log Σ exp over rows of logits, float32 [n_vocab] each; keeps small buffers."""

    def __init__(self) -> None:
        self._buffer = np.empty(PIECE, np.float32)
        self._address = self._buffer.ctypes.data
        self._own, self._native = look.own(), _native()

    def __call__(self, logits: NDArray[np.float32], address: int, near: float) -> float:
        """The logarithm of the sum over `logits`, which lie at `address`; the row is not changed.

        `near` is what is subtracted before exponentials are taken: any logit within 80 of the
        largest does, and saves the search for that one. Where it is further off the largest is used
        after all.
        """
        total = self._sum(logits, address, near) if math.isfinite(near) else math.inf
        return self._log(logits, address, near, total)

    def with_strands(
        self, logits: NDArray[np.float32], address: int, near: float, strands: look.Strands
    ) -> float:
        """The same; where one look can see both, the largest of the row's strands are known then."""
        if self._own is None or not math.isfinite(near):
            return self(logits, address, near)
        total = self._own.total(address, len(logits), near, strands.place(len(logits)))
        if not math.isnan(total):
            strands.known()
        return self._log(logits, address, near, total)

    def _log(self, logits: NDArray[np.float32], address: int, near: float, total: float) -> float:
        """The logarithm of a total, which is anew where `near` was too far off."""
        if not math.isfinite(total) or total < TINY:
            near = float(logits.max())
            total = self._sum(logits, address, near)
        return near + math.log(total)

    def _sum(self, logits: NDArray[np.float32], address: int, near: float) -> float:
        native, count = self._native, len(logits)
        if self._own is not None:
            return float(self._own.total(address, count, near, None))
        if native is None:
            return sum(self._plain(logits[at : at + PIECE], near) for at in range(0, count, PIECE))
        total = 0.0
        for at in range(0, count, PIECE):
            total += native(min(PIECE, count - at), self._address, address + 4 * at, near)
        return total

    def _plain(self, piece: NDArray[np.float32], near: float) -> float:
        out = self._buffer[: len(piece)]
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(piece, np.float32(near), out=out)
            np.exp(out, out=out)
        return float(out.sum(dtype=np.float64))


@functools.cache
def _native() -> Any | None:
    spec = find_spec("llama_cpp")
    assert spec and spec.origin
    for name in NAMES.get(sys.platform, ()):
        path = Path(spec.origin).parent / "lib" / name
        if path.exists() and (function := getattr(ctypes.CDLL(str(path)), SYMBOL, None)):
            function.restype = ctypes.c_double
            function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float]
            return function
    return None
