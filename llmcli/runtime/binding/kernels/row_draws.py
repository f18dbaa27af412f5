"""llmcli's C function that draws from many rows of logits at once, on several threads (row_draws.c),
if it is installed.
"""

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.kernels import ggml_cpu
from llmcli.runtime.binding.kernels.row_scan import has_interface
from llmcli.runtime.binding.library import lib
from quant.native import kernels

# Below this many logits in all rows, waking other threads takes longer than it saves.
MIN_PARALLEL_LOGITS = 1 << 19
# Tokens of a longer window are recorded once each.
LONG_WINDOW = 1024


class RowDraw(ctypes.Structure):
    """What to draw from one row of logits, and the result: struct row_draw of row.h."""

    __slots__ = ("_kept", "_kept_tokens")
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("samplers", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("bias_tokens", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("banned", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("rest", ctypes.c_int64),
        ("sampler_count", ctypes.c_int64),
        ("token_count", ctypes.c_int64),
        ("bias_count", ctypes.c_int64),
        ("banned_count", ctypes.c_int64),
        ("few", ctypes.c_int64),
        ("replays", ctypes.c_int64),
        ("wants_sum", ctypes.c_int64),
        ("sum", ctypes.c_double),
        ("token", ctypes.c_int64),
        ("near", ctypes.c_float),
    )

    def set_samplers(self, samplers: Sequence[int], first: int, rest: int, few: int) -> None:
        """Set the samplers of the chain. `samplers`: their addresses. Those from `first` to `rest`
        change single tokens. `few`: how many likeliest tokens the sampler `rest` keeps, or 0.
        """
        addresses = (ctypes.c_void_p * len(samplers))(*samplers)
        self.samplers = ctypes.addressof(addresses)
        self.first, self.rest, self.sampler_count, self.few = first, rest, len(samplers), few
        self._kept: tuple[Any, ...] = (addresses,)  # C has only their addresses

    def set_biases(self, biases: Sequence[tuple[int, float]]) -> None:
        """Set the numbers that are added to the logits of single tokens."""
        tokens = np.array([token for token, _ in biases], np.int32)
        values = np.array([bias for _, bias in biases], np.float32)
        self.bias_tokens, self.biases = tokens.ctypes.data, values.ctypes.data
        self.bias_count = len(biases)
        self._kept = (*self._kept, tokens, values)

    def set_options(self, banned: NDArray[np.int32] | None, near: float | None) -> None:
        """Set `banned`: tokens that must not be drawn; the array must stay alive. Set `near`: a
        number near the largest logit, if the sum of exponentials is wanted.
        """
        self.wants_sum = near is not None
        if near is not None:
            self.near = near
        self.banned_count = 0
        if banned is not None and len(banned):
            self.banned, self.banned_count = banned.ctypes.data, len(banned)

    def set_tokens(self, tokens: "array[int]") -> None:
        """Set the tokens that the samplers which change single tokens may change. The array must
        not change before the draw.
        """
        self.tokens, self.token_count = tokens.buffer_info()
        self._kept_tokens = tokens


class SamplerFunctions(ctypes.Structure):
    """The addresses of llama.cpp's functions that row_draws.c calls."""

    __slots__ = ()
    _fields_ = (
        ("apply", ctypes.c_void_p),
        ("accept", ctypes.c_void_p),
        ("reset", ctypes.c_void_p),
    )


class RowDraws(NamedTuple):
    """The C function, llama.cpp's functions for it, and ggml's OpenMP (0: it has none)."""

    function: Any
    samplers: SamplerFunctions
    openmp: int

    def draw(self, draws: Sequence[RowDraw], n_vocab: int, threads: int) -> None:
        """Draw from all rows, and write the results into `draws`. No two may have the same row or
        the same samplers.
        """
        count = len(draws)
        addresses = (ctypes.c_void_p * count)(*map(ctypes.addressof, draws))
        if count * n_vocab < MIN_PARALLEL_LOGITS:
            threads = 1
        self.function(
            addresses, count, n_vocab, ctypes.addressof(self.samplers), threads, self.openmp
        )


@functools.cache
def load_row_draws() -> RowDraws | None:
    """Return the C function, or None if it is not installed."""
    library = kernels.open_kernels().library
    return None if library is None else declare_function(library)


def declare_function(library: Any) -> RowDraws | None:
    """Return the C function of a ctypes library, or None if it is that of another version of
    llmcli, whose structure is laid out differently.
    """
    if not has_interface(library) or library.llmcli_row_draw_size() != ctypes.sizeof(RowDraw):
        return None
    function = library.llmcli_draw_rows
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    function.restype, function.argtypes = None, [pointer, count, count, pointer, count, pointer]
    names = ("apply", "accept", "reset")
    functions = (getattr(lib(), f"llama_sampler_{name}") for name in names)
    addresses = (ctypes.cast(one, ctypes.c_void_p).value for one in functions)
    return RowDraws(function, SamplerFunctions(*addresses), ggml_cpu.openmp_address())


class ReadTokens:
    """The tokens that samplers with a memory of the text have read: those which such samplers may
    change. There may be a few more, and some twice.
    """

    def __init__(self, window: int) -> None:
        """`window`: how many of the last tokens the samplers remember."""
        self.tokens, self._window = array("i"), window
        self._known: set[int] | None = set() if window > LONG_WINDOW else None

    def add(self, token: int) -> None:
        """Add a token that the samplers have read."""
        if self._known is not None:
            if token not in self._known:
                self._known.add(token)
                self.tokens.append(token)
            return
        self.tokens.append(token)
        if len(self.tokens) > 2 * self._window:
            del self.tokens[: -self._window]
