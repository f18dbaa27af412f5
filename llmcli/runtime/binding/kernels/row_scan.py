"""llmcli's C functions over a row of logits (row.c), if the build of llama.cpp contains them."""

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np

from quant.native import ggml


class RowScan(NamedTuple):
    """llmcli's C functions. The argument `row` of a function consists of the address of the logits,
    their number, the address of the row's strand maxima, and whether these are filled in.
    """

    count_maxima: Any  # (number of logits) -> number of strand maxima, floats
    sum_exp: Any  # (logits, number, near, strand maxima or None) -> sum of exponentials
    find_likeliest: Any  # (*row) -> id
    find_few: Any  # (*row, few, llama_token_data, its capacity) -> number found
    draw: Any  # (*row, few, llama_token_data, its capacity, llama_sampler_apply, chain) -> id


@functools.cache
def load_row_scan() -> RowScan | None:
    """Return the C functions of the installed libggml-base, or None if it does not contain them."""
    return declare_functions(ggml.open_library())


def declare_functions(library: Any) -> RowScan | None:
    """Return the C functions of `library` with their argument types declared, or None if it does
    not contain them.
    """
    pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    if not hasattr(library, "llmcli_draw"):
        return None
    names = ("strands", "look", "likeliest", "few", "draw")
    functions = RowScan(*(getattr(library, f"llmcli_{name}") for name in names))
    row = [pointer, count, pointer, flag]
    functions.count_maxima.restype, functions.count_maxima.argtypes = count, [count]
    functions.sum_exp.restype, functions.sum_exp.argtypes = (
        ctypes.c_double,
        [pointer, count, ctypes.c_float, pointer],
    )
    functions.find_likeliest.restype, functions.find_likeliest.argtypes = count, row
    functions.find_few.restype, functions.find_few.argtypes = count, [*row, count, pointer, count]
    functions.draw.restype, functions.draw.argtypes = (
        count,
        [*row, count, pointer, count, pointer, pointer],
    )
    return functions


class RowMaxima:
    """A buffer for the maxima of a row's strands (row.c), and whether it is filled in for the row
    that is drawn from next.

    `scan`: the C functions, or None if the build does not contain them. The buffer is never filled
    in then.
    """

    def __init__(self) -> None:
        self.scan = load_row_scan()
        self._room, self._place, self._count, self._known = np.empty(0, np.float32), 0, 0, False

    def buffer_address(self, count: int) -> int:
        """Return the address of the buffer, resized for `count` logits."""
        if count != self._count:
            assert self.scan is not None
            self._room, self._count = np.empty(self.scan.count_maxima(count), np.float32), count
            self._place = self._room.ctypes.data
        return self._place

    def mark_filled(self) -> None:
        """Record that the maxima were written for the row that is drawn from next."""
        self._known = True

    def consume(self, count: int) -> tuple[int, bool]:
        """Return the address of the buffer, and whether it is filled in. From then on it counts as
        not filled in, because the row may be changed.
        """
        is_filled, self._known = self._known, False
        return self.buffer_address(count), is_filled
