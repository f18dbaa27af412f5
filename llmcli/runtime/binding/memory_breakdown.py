"""Reads from a context how many bytes llama.cpp has allocated, or would allocate in a dry run.

`llama_get_memory_breakdown` is a C++ function of include/llama-ext.h that returns a std::map by
value. It is exported under its mangled name. libstdc++ lays out the map as six words, and each of
its nodes as {color, parent, left, right, key, model, context, compute}. Where the symbol is missing
or the layout differs (libc++, MSVC), the result is None.
"""

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from llmcli.runtime.binding import contract
from llmcli.runtime.binding.library import ggml
from llmcli.runtime.binding.placement.devices import MAPPED_BUFFER, BufferType, read_buffer_type


@dataclass(frozen=True, slots=True)
class BufferBytes:
    """The bytes of all buffers of one type, by their use: weights (`model_bytes`), KV cache and
    other state (`context_bytes`), and intermediate results of a pass (`compute_bytes`).
    """

    buffer_type: BufferType
    model_bytes: int
    context_bytes: int
    compute_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """The bytes of a context and its model. There is one entry for each type of buffer."""

    buffers: tuple[BufferBytes, ...]

    def with_context(self, other: "MemoryBreakdown") -> "MemoryBreakdown":
        """Return the breakdown together with the buffers of another context of the same model."""
        added = {buffer.buffer_type: buffer for buffer in other.buffers}
        known = [buffer.buffer_type for buffer in self.buffers]
        buffers = [
            replace(
                buffer,
                context_bytes=buffer.context_bytes + added[kind].context_bytes,
                compute_bytes=buffer.compute_bytes + added[kind].compute_bytes,
            )
            if (kind := buffer.buffer_type) in added
            else buffer
            for buffer in self.buffers
        ]
        buffers += [
            replace(buffer, model_bytes=0) for kind, buffer in added.items() if kind not in known
        ]
        return MemoryBreakdown(tuple(buffers))

    @property
    def model_bytes(self) -> int:
        """Return the bytes of all weights, including mapped files and repacked copies."""
        return sum(buffer.model_bytes for buffer in self.buffers)

    @property
    def context_bytes(self) -> int:
        """Return the bytes of the KV cache and of other state, such as recurrent state."""
        return sum(buffer.context_bytes for buffer in self.buffers)

    @property
    def compute_bytes(self) -> int:
        """Return the bytes of the buffers for intermediate results of a pass."""
        return sum(buffer.compute_bytes for buffer in self.buffers)

    @property
    def mapped_bytes(self) -> int:
        """Return the bytes of weights on the host that are used from the mapped file."""
        return sum(
            buffer.model_bytes
            for buffer in self.buffers
            if buffer.buffer_type.name == MAPPED_BUFFER
        )

    @property
    def repacked_bytes(self) -> int:
        """Return the bytes of weights that were copied into the layout of this CPU's kernels."""
        return sum(buffer.model_bytes for buffer in self.buffers if buffer.buffer_type.is_repacked)


class _Map(ctypes.Structure):
    """The header of a libstdc++ std::map."""

    _fields_ = [
        (name, ctypes.c_uint64) for name in ("compare", "colour", "root", "left", "right", "count")
    ]


def read_memory_breakdown(context: Any) -> MemoryBreakdown | None:
    """Return the bytes of a context and its model. `context`: the llama_context pointer. Return
    None when this build of llama.cpp does not report them.
    """
    function = contract.optional_function(ggml(), contract.MEMORY_BREAKDOWN)
    if function is None or not sys.platform.startswith("linux"):
        return None
    function.restype, function.argtypes = _Map, [ctypes.c_void_p]
    header = function(context)
    rows = list(_nodes(header.root)) if header.count else []
    if len(rows) != header.count:
        return None
    return MemoryBreakdown(
        tuple(BufferBytes(read_buffer_type(kind), *sizes) for kind, *sizes in rows)
    )


def _nodes(address: int, depth: int = 0) -> Iterator[tuple[int, int, int, int]]:
    """Yield key and the three byte counts of each node of a std::map, from the node at `address`
    down. The depth is limited so that an unknown layout cannot cause an endless recursion.
    """
    if not address or depth > 64:
        return
    words = (ctypes.c_uint64 * 8).from_address(address)
    yield words[4], words[5], words[6], words[7]
    yield from _nodes(words[2], depth + 1)
    yield from _nodes(words[3], depth + 1)
