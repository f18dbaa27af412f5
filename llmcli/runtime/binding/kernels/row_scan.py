"""llmcli's C functions that scan a row of logits (row.c), if they are installed.
A strand is a group of logits whose maximum the C code computes together.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np

from quant.native import kernels

INTERFACE = 2  # as in row.h


class RowScan(NamedTuple):
    """The C functions of row.c, with their arguments and results in the comments. `*row` stands for
    four arguments: the address of the logits, their number, the address of the row's strand maxima,
    and whether the maxima are filled in.
    """

    count_maxima: Any  # (number of logits) -> number of strand maxima, floats
    sum_exp: Any  # (logits, number, near, strand maxima or None) -> sum of exponentials
    note_change: Any  # (logits, number, strand maxima, id of a changed logit, its value before)
    find_likeliest: Any  # (*row) -> id
    find_few: Any  # (*row, few, llama_token_data, its capacity) -> number found
    draw: Any  # (*row, few, llama_token_data, its capacity, llama_sampler_apply, chain) -> id


@functools.cache
def load_row_scan() -> RowScan | None:
    """Return the C functions, or None if they are not installed."""
    library = kernels.open_kernels().library
    return None if library is None else declare_functions(library)


def declare_functions(library: Any) -> RowScan | None:
    """Return the C functions of a ctypes library, with their argument types declared. Return None
    if they are those of another version of llmcli.
    """
    pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    if not has_interface(library):
        return None
    names = ("maxima", "look", "changed", "likeliest", "few", "draw")
    functions = RowScan(*(getattr(library, f"llmcli_{name}") for name in names))
    row = [pointer, count, pointer, flag]
    functions.count_maxima.restype, functions.count_maxima.argtypes = count, [count]
    functions.sum_exp.restype, functions.sum_exp.argtypes = (
        ctypes.c_double,
        [pointer, count, ctypes.c_float, pointer],
    )
    functions.note_change.restype, functions.note_change.argtypes = (
        None,
        [pointer, count, pointer, count, ctypes.c_float],
    )
    functions.find_likeliest.restype, functions.find_likeliest.argtypes = count, row
    functions.find_few.restype, functions.find_few.argtypes = count, [*row, count, pointer, count]
    functions.draw.restype, functions.draw.argtypes = (
        count,
        [*row, count, pointer, count, pointer, pointer],
    )
    return functions


def has_interface(library: Any) -> bool:
    """Return whether a ctypes library has the functions and structures of our row.h. The installed
    library may be that of an older or newer llmcli.
    """
    function = getattr(library, "llmcli_row_interface", None)
    return function is not None and function() == INTERFACE


class RowMaxima:
    """A reusable buffer for the maximum of each strand of a row of logits. A strand is a fixed
    subset of the logits (row.c).

    A scan for log-probabilities fills the buffer in, and then the next token is drawn without
    scanning the row again. A flag says whether the buffer belongs to the row that is drawn from.

    `scan`: the C functions, or None if they are not installed. Without them the buffer is never
    filled in.
    """

    def __init__(self) -> None:
        self.scan = load_row_scan()
        self._buffer, self._address, self._count, self._is_filled = (
            np.empty(0, np.float32),
            0,
            0,
            False,
        )

    def buffer_address(self, count: int) -> int:
        """Return the address of the buffer, which is resized for a row of `count` logits if
        necessary.
        """
        if count != self._count:
            assert self.scan is not None
            self._buffer, self._count = np.empty(self.scan.count_maxima(count), np.float32), count
            self._address = self._buffer.ctypes.data
        return self._address

    def mark_filled(self) -> None:
        """Record that the buffer holds the maxima of the row from which the next token is drawn."""
        self._is_filled = True

    def consume(self, count: int) -> tuple[int, bool]:
        """Return the address of the buffer for a row of `count` logits, and whether it is filled
        in. Afterwards it counts as not filled in, because the row may be changed.
        """
        is_filled, self._is_filled = self._is_filled, False
        return self.buffer_address(count), is_filled
