"""Our own C that looks at a row of logits (row.c), where the build of llama.cpp has it."""

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np

from quant import native


class Look(NamedTuple):
    """Its functions, over addresses; what they do stands in row.c. A row is where its logits lie
    and how many they are, where its strands' largest lie or may, and whether they are known.
    """

    strands: Any  # (how many logits) -> floats of their strands' largest
    total: Any  # (logits, how many, near, strands' largest or None) -> sum of exponentials
    likeliest: Any  # (*row) -> id
    few: Any  # (*row, few, llama_token_data, how many of these) -> how many
    draw: Any  # (*row, few, llama_token_data, how many of these, llama_sampler_apply, chain) -> id


@functools.cache
def own() -> Look | None:
    """What the installed libggml-base has of it."""
    return declared(native.library())


def declared(library: Any) -> Look | None:
    """The functions of `library` with their types; None where it has none of them."""
    pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    if not hasattr(library, "llmcli_draw"):
        return None
    names = ("strands", "look", "likeliest", "few", "draw")
    found = Look(*(getattr(library, f"llmcli_{name}") for name in names))
    row = [pointer, count, pointer, flag]
    found.strands.restype, found.strands.argtypes = count, [count]
    found.total.restype, found.total.argtypes = (
        ctypes.c_double,
        [pointer, count, ctypes.c_float, pointer],
    )
    found.likeliest.restype, found.likeliest.argtypes = count, row
    found.few.restype, found.few.argtypes = count, [*row, count, pointer, count]
    found.draw.restype, found.draw.argtypes = count, [*row, count, pointer, count, pointer, pointer]
    return found


class Strands:
    """Room for the largest of a row's strands, and whether they are known of the row that comes
    next.

    `own` None: there is none of our C, and nothing is ever known.
    """

    def __init__(self) -> None:
        self.own = own()
        self._room, self._place, self._count, self._known = np.empty(0, np.float32), 0, 0, False

    def place(self, count: int) -> int:
        """Where those of `count` logits may be written."""
        if count != self._count:
            assert self.own is not None
            self._room, self._count = np.empty(self.own.strands(count), np.float32), count
            self._place = self._room.ctypes.data
        return self._place

    def known(self) -> None:
        """They have been written, and the row is the next to be drawn from."""
        self._known = True

    def take(self, count: int) -> tuple[int, bool]:
        """Where they stand or may, and whether they are known; that is forgotten: the row may be
        written to.
        """
        known, self._known = self._known, False
        return self.place(count), known
