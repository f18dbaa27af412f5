"""The bytes that llama.cpp allocated, or would allocate, read back from a context.

`llama_get_memory_breakdown` is a C++ function of include/llama-ext.h that returns a std::map by
value; it is exported under its mangled name. libstdc++ lays the map out as six words, its nodes as
{colour, parent, left, right, key, model, context, compute}. Where the symbol or the layout is
another one (libc++, MSVC) the answer is None and callers say "unknown": never a guess.
"""

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmcli.runtime.binding.devices import Place, place
from llmcli.runtime.binding.library import lib

SYMBOL = "_Z26llama_get_memory_breakdownPK13llama_context"


@dataclass(frozen=True, slots=True)
class Buffers:
    """All buffers of one type: bytes of weights, of KV (and other state), of compute buffers."""

    place: Place
    model: int
    context: int
    compute: int


@dataclass(frozen=True, slots=True)
class Allocated:
    """What a context and its model hold, by type of buffer."""

    buffers: tuple[Buffers, ...]

    @property
    def model(self) -> int:
        """Bytes of weights: those of the mapped file, and the copies that were laid out anew."""
        return sum(one.model for one in self.buffers)

    @property
    def context(self) -> int:
        """Bytes of KV and other state."""
        return sum(one.context for one in self.buffers)

    @property
    def compute(self) -> int:
        """Bytes of compute buffers."""
        return sum(one.compute for one in self.buffers)

    @property
    def repacked(self) -> int:
        """Bytes of weights that were copied into another layout for this CPU."""
        return sum(one.model for one in self.buffers if one.place.repacks)


class _Map(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64) for name in ("compare", "colour", "root", "left", "right", "count")
    ]


def allocated(context: Any) -> Allocated | None:
    """What the context and its model hold, or None where this build cannot be asked."""
    function = getattr(getattr(lib(), "_lib", None), SYMBOL, None)
    if function is None or not sys.platform.startswith("linux"):
        return None
    function.restype, function.argtypes = _Map, [ctypes.c_void_p]
    header = function(context)
    rows = list(_nodes(header.root)) if header.count else []
    if len(rows) != header.count:
        return None
    return Allocated(tuple(Buffers(place(kind), *sizes) for kind, *sizes in rows))


def _nodes(address: int, depth: int = 0) -> Iterator[tuple[int, int, int, int]]:
    if not address or depth > 64:
        return
    words = (ctypes.c_uint64 * 8).from_address(address)
    yield words[4], words[5], words[6], words[7]
    yield from _nodes(words[2], depth + 1)
    yield from _nodes(words[3], depth + 1)
